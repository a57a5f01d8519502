"""pawl's orchestrator: takes a run from one YAML file to a finished model and keeps it moving forward.

It shares records and one command line with the trainer, never a Python module, and never imports torch.
"""

__version__ = "0.1.0"
