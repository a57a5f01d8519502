"""Checkpoints out to the formats of other software: a Hugging Face folder that transformers and vLLM load.

names.py      canonical name ↔ Hugging Face name, one table        hf_config.py  architecture → config.json
fold.py       factors of the forward pass → weights
export_hf.py  the streaming read of the master boxes               cli.py        `python -m trainer convert`
"""
