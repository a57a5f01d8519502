"""The arguments of `trainer train`; the training itself (and torch) is imported when it starts."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-file", type=Path, required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("--run-dir", type=Path, default=None, metavar="DIR", help="where checkpoints and records go")
    parser.add_argument("--cycle", type=Path, default=None, metavar="FILE", help="cycle.json of the orchestrator")
    parser.add_argument("--shm", type=Path, default=None, metavar="FILE", help="shared memory for beats")


def main(args: argparse.Namespace) -> int:
    from trainer.run import main as run

    return run(args)
