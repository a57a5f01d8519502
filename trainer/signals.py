"""Signals set flags or dump stacks, nothing else: a checkpoint written inside a handler is a torn checkpoint.

Under an agent (`--cycle`)   SIGUSR2  stacks of all threads into the evidence file; written in C, so a rank that holds
                                      the GIL or is stuck in a collective still answers
                             SIGINT   ignored: a Ctrl-C in a terminal reaches the whole group, only the agent decides
                             SIGTERM  default end
On its own                   SIGTERM, SIGUSR2  ask for a drain at the next step border
"""

import faulthandler
import signal
from pathlib import Path
from types import FrameType


class DrainFlag:
    """Set by a signal, read by the loop at the step border."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None

    def set(self, signum: int, _frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(signum).name


def install_supervised(stacks: Path) -> None:
    """Dump stacks to `stacks` on SIGUSR2. The file is opened now: a rank that hangs may no longer be able to."""
    stacks.parent.mkdir(parents=True, exist_ok=True)
    file = stacks.open("a")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def install_alone(flag: DrainFlag) -> None:
    """Drain on SIGTERM or SIGUSR2, as plain Slurm sends them."""
    faulthandler.enable()
    signal.signal(signal.SIGTERM, flag.set)
    signal.signal(signal.SIGUSR2, flag.set)
