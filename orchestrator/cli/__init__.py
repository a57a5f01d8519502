"""The command line `pawl`: this module only decides what to import, so that `pawl --help` stays fast."""

import sys


def main() -> None:
    """Entry point of the console script; ends the process with the command's exit code."""
    from orchestrator.cli.app import run

    sys.exit(run(sys.argv[1:]))
