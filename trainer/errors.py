"""The trainer's errors, each with the exit code the orchestrator acts on.

TrainerError (1; 92 where a full or failing file system is the cause)
├── ConfigError (78)          the config or the launch is wrong: an edit is needed, never retried
├── NonFiniteError (86)       loss or gradients are not finite on some rank
├── DataError (88)            a shard or record cannot be read as described
│   └── UsageError (2)        an argument of a command names something that is not there or does not fit
├── CheckpointInvalid (89)    the checkpoint named by the cycle does not verify
├── DesyncError (91)          ranks that must hold the same bits do not
└── Interrupted (130)         a person pressed Ctrl-C
"""

from pathlib import Path


class TrainerError(Exception):
    """One paragraph for a person: what happened, where, what to do."""

    exit_code = 1
    kind = "crashed"


class ConfigError(TrainerError):
    """The config, or the launch that was made from it, cannot train."""

    exit_code = 78
    kind = "config_error"


class NonFiniteError(TrainerError):
    """All ranks agreed that the loss or the gradients of a step are not finite."""

    exit_code = 86
    kind = "nonfinite"


class DataError(TrainerError):
    """A token shard or its metadata does not say what the config expects."""

    exit_code = 88
    kind = "data_error"


class UsageError(DataError):
    """A person's argument, not the data: another command line is needed."""

    exit_code = 2


class Interrupted(TrainerError):
    """Ctrl-C in a command for people; the message says what a second call does."""

    exit_code = 130


class CheckpointInvalid(TrainerError):
    """A checkpoint failed verification; `bad_file` is the file that is missing, short or changed."""

    exit_code = 89
    kind = "checkpoint_invalid"

    def __init__(self, message: str, *, bad_file: Path | None = None) -> None:
        super().__init__(message)
        self.bad_file = bad_file


class DesyncError(TrainerError):
    """All ranks found that copies differ. `suspects`: the ranks that most copies contradict, () where nobody knows."""

    exit_code = 91
    kind = "desync"

    def __init__(self, message: str, *, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects
