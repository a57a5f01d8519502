"""Is a checkpoint whole, and which of a directory is the newest that is? No torch.

Size and digest of every file are compared with the manifest. Names that are no checkpoint (a half-written folder, a
stray one, a file) are never loaded; they are reported with the reason, and left where they are: only the orchestrator
moves or deletes.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.naming import CheckpointName, parse_name
from trainer.checkpoint.reader import BoxReader, Checkpoint, check_file, open_checkpoint
from trainer.errors import CheckpointInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """An entry of a checkpoint directory that is not a usable checkpoint, and why. bad_file: None if not one file."""

    name: str
    reason: str
    bad_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The newest usable checkpoint (None: there is none) and everything that was passed over on the way."""

    path: Path | None
    rejected: tuple[Rejected, ...]


def problems(path: Path) -> tuple[CheckpointInvalid, ...]:
    """Everything that is wrong with a checkpoint: its tables, or else each damaged file. Empty: it is whole."""
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointInvalid as error:
        return (error,)
    found = []
    for record in checkpoint.manifest.files:
        try:
            check_file(path, record)
        except CheckpointInvalid as error:
            found.append(error)
    return tuple(found) or _content_problems(checkpoint)


def _content_problems(checkpoint: Checkpoint) -> tuple[CheckpointInvalid, ...]:
    """Files as written, but not holding what the index promises: the writer was wrong."""
    reader = BoxReader(checkpoint)
    for name, tensor in checkpoint.index.tensors.items():
        for state in tensor.states:
            try:
                for saved in tensor.boxes:
                    for _ in reader.parts(name, state, saved.box):
                        pass
            except CheckpointInvalid as error:
                return (error,)
    return ()


def choose_newest(directory: Path) -> Choice:
    """The newest checkpoint of `directory` that verifies completely; for runs without a cycle file.

    A directory that does not exist holds none: the first run of all starts fresh.
    """
    named: list[tuple[CheckpointName, Path]] = []
    rejected: list[Rejected] = []
    for entry in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = parse_name(entry.name)
        if name is not None and entry.is_dir():
            named.append((name, entry))
        elif not entry.name.startswith((".trash-", ".quarantine-")):
            rejected.append(Rejected(name=entry.name, reason=_stray_reason(entry)))
    for _, path in sorted(named, reverse=True):
        found = problems(path)
        if not found:
            return Choice(path=path, rejected=tuple(rejected))
        rejected.append(Rejected(name=path.name, reason=str(found[0]), bad_file=found[0].bad_file))
    return Choice(path=None, rejected=tuple(rejected))


def _stray_reason(entry: Path) -> str:
    if entry.name.endswith(".partial"):
        return f"{entry}: a save that did not finish; it holds no complete checkpoint and is not loaded."
    return f"{entry}: is not a checkpoint folder (step-<step>.<epoch>) and is ignored."
