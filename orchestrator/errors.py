"""The orchestrator's errors, each with the exit code of the command line.

PawlError (1)
├── UsageError (2)          the command or the config is wrong; nothing was written
│   └── ConfigProblems (2)  one or more problems of a config, all of them listed
├── RunHeld (3)             the run waits for a person; resumable as it is
└── SlurmUnreachable (4)    Slurm is not installed here or does not answer
"""


class PawlError(Exception):
    """One paragraph for a person: what happened, where, what to do."""

    exit_code = 1


class UsageError(PawlError):
    """The command line or a file given to it cannot be used; nothing was written."""

    exit_code = 2


class ConfigProblems(UsageError):
    """A config has problems; the message lists all of them, one per line."""


class RunHeld(PawlError):
    """The run is HELD: it stops relaunching until a person resumes it."""

    exit_code = 3


class SlurmUnreachable(PawlError):
    """Slurm's commands are missing or slurmctld does not answer."""

    exit_code = 4
