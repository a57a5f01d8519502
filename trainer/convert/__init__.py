"""Checkpoints out to the formats of other software and back: a Hugging Face folder that transformers and vLLM load.

names.py   canonical name ↔ Hugging Face name, one table     fold.py  factors of the forward pass → weights
out        export_hf.py: the streaming read of the master boxes; hf_config.py: architecture → config.json
in         hf_model.py: config.json → architecture, or what stands against it; hf_folder.py: which tensor lies where;
           import_hf.py: the stream into a checkpoint of step 0
cast.py  shards.py  tokenizer_files.py  cli.py (`python -m trainer convert`)
"""
