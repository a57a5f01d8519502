"""Checkpoints are boxes: every rank writes rectangles of canonical tensors to a file of its own, any mesh reads them.

boxes.py  what a flat slice of a tensor looks like as rectangles   plan.py    which rectangles a rank owns
index.py  the table of contents, computed by any rank              save.py    write, verify, commit
load.py   verify, intersect, assert exact cover                    verify.py  the same checks without torch
"""
