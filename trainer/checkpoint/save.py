"""Write a checkpoint so that it counts only when it is whole.

    rank 0     makes .step-….partial (refuses if the name is taken)
    each rank  writes its boxes to a file of its own, syncs it, reads it back           no communication
    all        report size and digest to each other
    rank 0     checks the sizes it sees, writes index.json and config.yaml, then manifest.json, each synced with the
               folder, renames it to step-…, syncs the parent

A kill at any instant leaves either a complete checkpoint or a `.partial` folder that no reader looks at. Nothing is
ever overwritten. After a failure that all ranks survive (no space), rank 0 removes the partial folder it made. When a
save runs, and beside what, is decided in `saver.py`.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer import __version__
from trainer.checkpoint.contents import Contents, RankContents
from trainer.checkpoint.index import build_index
from trainer.checkpoint.manifest import FileRecord, Manifest
from trainer.checkpoint.naming import CONFIG, INDEX, MANIFEST, CheckpointName, partial_name
from trainer.checkpoint.shards import RankShards
from trainer.checkpoint.state import RunState
from trainer.checkpoint.tensorfile import write_tensors
from trainer.checkpoint.together import Meeting, SaveFailed, together
from trainer.data.format import file_xxh3
from trainer.data.tokenizer import TOKENIZER_JSON, tokenizer_sha256
from trainer.fsio import fsync_directory, write_atomic
from trainer.mup import attention_scale, output_multiplier

if TYPE_CHECKING:
    from trainer.config.model import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A committed checkpoint: its name and step, the bytes of all its files, when it was committed (Unix seconds)."""

    name: str
    step: int
    bytes: int
    unix: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the manifest says beside the weights."""

    run: str
    name: CheckpointName
    state: RunState
    config_text: str
    model_config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None


def write_checkpoint(
    meeting: Meeting,
    contents: Contents,
    shards: RankShards,
    facts: Facts,
    *,
    checkpoints_dir: Path,
    before_commit: Callable[[], None] | None = None,
) -> SaveResult:
    """Write `contents` and commit. Of `shards` only plan and place are read, not the values. Comm: 3 all-gathers of a
    kilobyte over `meeting`.

    Raises SaveFailed on every rank if any rank fails, or if a checkpoint or a leftover of this name exists.
    """
    leads = shards.rank == 0
    final, partial = checkpoints_dir / str(facts.name), checkpoints_dir / partial_name(facts.name)
    together(meeting, lambda: begin(final, partial) if leads else {})
    try:
        files = together(meeting, lambda: asdict(write_contents(partial, contents)))
        committed = together(
            meeting, lambda: commit(partial, final, shards, facts, files, before_commit) if leads else {}
        )
    except Exception as error:
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        raise _failed(final, error) from error
    return SaveResult(name=str(facts.name), step=facts.state.step, **committed[0])


def _failed(final: Path, error: Exception) -> SaveFailed:
    return SaveFailed(f"The checkpoint {final} could not be written: {error}. Earlier checkpoints are untouched.")


def begin(final: Path, partial: Path) -> dict[str, Any]:
    """Make the partial folder. Raises SaveFailed if the checkpoint or an unfinished one of the same name exists."""
    for taken in (final, partial):
        if taken.exists():
            raise SaveFailed(
                f"{taken} exists already. A checkpoint is never overwritten: its name holds step and epoch, so the "
                "same save was made before. Move it away if it is not wanted."
            )
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise _failed(final, error) from error
    return {}


def write_rank(folder: Path, shards: RankShards) -> FileRecord:
    """Write the boxes that a rank owns as they are now; see `write_contents`."""
    return write_contents(folder, RankContents(shards).live(shards))


def write_contents(folder: Path, contents: Contents) -> FileRecord:
    """Write a rank's file, sync it, read it back meanwhile. Raises OSError if other bytes come back."""
    path, seen = folder / contents.file, list[str]()
    written = write_tensors(path, contents.entries, contents.arrays(), beside_sync=lambda: seen.append(file_xxh3(path)))
    if seen != [written.xxh3]:
        raise OSError(f"{path}: what is read back is not what was written")
    return FileRecord(name=path.name, bytes=written.num_bytes, xxh3=written.xxh3)


def commit(
    partial: Path,
    final: Path,
    shards: RankShards,
    facts: Facts,
    files: Sequence[Mapping[str, Any]],
    before_commit: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Check the files of all ranks, write the tables, rename. `files`: one FileRecord as a dict per rank."""
    records = [FileRecord(**file) for file in files]
    for record in records:
        size = (partial / record.name).stat().st_size
        if size != record.bytes:
            raise OSError(f"{partial / record.name} has {size:,} bytes here, its rank wrote {record.bytes:,}")
    index = build_index(
        shards.specs,
        shards.topology,
        layout_of=shards.layout_of,
        zero_stage=shards.zero_stage,
        step=facts.state.step,
        dtype=shards.dtype,
    )
    records.append(_write_text(partial / INDEX, json.dumps(index.to_json())))
    records.append(_write_text(partial / CONFIG, facts.config_text))
    manifest = Manifest(
        run=facts.run,
        step=facts.state.step,
        epoch=str(facts.name).partition(".")[2],
        state=facts.state,
        model_config=facts.model_config,
        tokenizer=facts.tokenizer,
        files=tuple(records),
        pawl_version=__version__,
        torch_version=torch.__version__,
        created_unix=time.time(),
    )
    # Each write syncs the folder too: the names of all files are durable before the manifest says that they exist.
    size = _write_text(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2)).bytes
    if before_commit is not None:
        before_commit()
    partial.rename(final)
    fsync_directory(final.parent)
    return {"bytes": manifest.total_bytes + size, "unix": manifest.created_unix}


def _write_text(path: Path, text: str) -> FileRecord:
    write_atomic(path, text)
    return FileRecord(name=path.name, bytes=path.stat().st_size, xxh3=file_xxh3(path))


def model_record(config: "Config") -> dict[str, Any]:
    """The architecture as the manifest has it: Hugging Face's words, the compute dtype, the factors of the forward."""
    return {
        **config.model.model_config_.model_dump(),
        "dtype": config.model.dtype,
        "attention_scale": attention_scale(config),
        "output_multiplier": output_multiplier(config),
    }


def tokenizer_record(path: str | None) -> dict[str, Any] | None:
    """{path, sha256} of a tokenizer; sha256 is None where its tokenizer.json is not on this machine. Raises OSError."""
    if path is None:
        return None
    file = Path(path) / TOKENIZER_JSON if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return {"path": path, "sha256": None}
    # Absolute, because the export may be made from another working directory than the run's.
    return {"path": str(Path(path).resolve()), "sha256": tokenizer_sha256(file)}
