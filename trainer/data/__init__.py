"""Token data: a folder format, a pure order of samples, a loader without state, and the tool that makes folders.

    prepare.py  texts + tokenizer → token folders          format.py   the folder and its memory-mapped reader
    mixture.py  sample index → (source, epoch, position)   feistel.py  a permutation that needs no table
    loader.py   (step, consumed samples) → StepBatch       batch.py    what one rank sees of one step

The state of the data is one integer, `consumed_samples`; there is nothing else to save or to restore.
"""
