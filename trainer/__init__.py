"""pawl's trainer: 3D-parallel pretraining of one model on the ranks of one launch.

It shares records and one command line with the orchestrator, never a Python module.
"""

__version__ = "0.1.0"
