"""Lines for supervisor.log, which may lie on a disk that is full: that must not end a run."""

import contextlib


def say(text: str) -> None:
    """One line on stdout; lost where nothing takes it."""
    with contextlib.suppress(OSError):
        print(f"supervisor: {text}", flush=True)
