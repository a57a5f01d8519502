"""Checkpoints behind a URL: any file system that fsspec knows (s3, gs, file, memory, …). No torch.

    push   folder ── data files, each digested as it goes ──▶ URL/<name>/…  ── manifest last: it is the commit ──▶
    pull   URL/<name>/… ── each file against the manifest ──▶ .<name>.partial ── rename ──▶ <name>

An object store has no rename, so a remote folder is a checkpoint when its manifest is there, reads, and every file it
lists has the size it says. A push that was cut off at any point left no manifest; the next one goes on with the files
that are missing. A name holds step and epoch and stands for one content: nothing is overwritten by other bytes.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import fsspec
import xxhash

from trainer.checkpoint.manifest import FileRecord, Manifest, parse_manifest
from trainer.checkpoint.naming import MANIFEST, parse_name, partial_name
from trainer.checkpoint.reader import check_file, open_checkpoint
from trainer.errors import CheckpointInvalid, TrainerError
from trainer.fsio import fsync_directory

CHUNK_BYTES = 1 << 20
FILES_AT_ONCE = 4

Progress = Callable[[str, int, int], None]
"""(file, bytes done of all files, bytes of all files)."""

T = TypeVar("T")


class TransferFailed(TrainerError):
    """A remote place cannot be reached, or did not take or give what was asked of it. Nothing that counts changed."""

    exit_code = 92
    kind = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often one file is tried, and the seconds before the second try; each later wait is twice as long."""

    tries: int = 5
    first_wait_s: float = 1.0
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, what: str, act: Callable[[], T]) -> T:
        """The result of `act`. Raises TransferFailed with the last error when no try succeeds."""
        for number in range(1, self.tries + 1):
            try:
                return act()
            except TrainerError:
                raise  # what is wrong with a checkpoint stays wrong
            except Exception as error:  # every store's library has errors of its own
                if number == self.tries:
                    raise TransferFailed(f"{what} failed {self.tries} times, the last time with: {error}") from error
                self.sleep(self.first_wait_s * 2 ** (number - 1))
        raise AssertionError("tries is at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder behind a URL: its file system, and the path there."""

    url: str
    fs: Any
    root: str

    def path(self, *parts: str) -> str:
        return "/".join((self.root.rstrip("/"), *parts))

    def shown(self, *parts: str) -> str:
        return "/".join((self.url.rstrip("/"), *parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An entry of a remote folder. `defect`: why it is no complete checkpoint, None when it is one."""

    name: str
    step: int
    num_bytes: int | None
    defect: str | None


def open_place(url: str) -> Place:
    """Raises TransferFailed for a URL that nothing here can open."""
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise TransferFailed(
            f"{url} cannot be opened ({error}). Install what its protocol needs (s3://: s3fs, gs://: gcsfs), or name "
            "another place."
        ) from error
    return Place(url=url, fs=fs, root=str(root))


def push(
    checkpoint: Path, place: Place, *, retry: Retry | None = None, progress: Progress | None = None
) -> tuple[Manifest, int]:
    """Copy a checkpoint to `place`/<its name>; returns its manifest and the bytes that had to be sent.

    Raises CheckpointInvalid if the folder is not whole (the digest of each file is compared while it is sent),
    TransferFailed if the place does not take it.
    """
    retry, name = retry or Retry(), checkpoint.name
    if parse_name(name) is None:
        raise TransferFailed(f"{checkpoint} has no checkpoint's name (step-<step>.<epoch>); push the folder itself.")
    manifest = open_checkpoint(checkpoint).manifest
    there = retry(f"Listing {place.shown(name)}", lambda: _sizes(place, name))
    missing = [record for record in manifest.files if there.get(record.name) != record.bytes]
    if not missing and _is_committed(place, manifest, name, retry):
        return manifest, 0
    if MANIFEST in there:  # it would vouch for files that are about to be written again
        retry(f"Removing {place.shown(name, MANIFEST)}", lambda: place.fs.rm_file(place.path(name, MANIFEST)))
    counter = _Counter(manifest, missing, progress)

    def send(record: FileRecord) -> None:
        retry(f"Writing {place.shown(name, record.name)}", lambda: _send(checkpoint, place, record, counter))

    _each(missing, send)
    there = retry(f"Listing {place.shown(name)}", lambda: _sizes(place, name))
    wrong = [record for record in manifest.files if there.get(record.name) != record.bytes]
    if wrong:
        raise TransferFailed(
            f"{place.shown(name, wrong[0].name)} has {there.get(wrong[0].name, 'no')} bytes after it was written, "
            f"{wrong[0].bytes:,} were sent. It has no manifest and does not count; push it again."
        )
    text = (checkpoint / MANIFEST).read_bytes()
    retry(f"Writing {place.shown(name, MANIFEST)}", lambda: place.fs.pipe_file(place.path(name, MANIFEST), text))
    return manifest, sum(record.bytes for record in missing) + len(text)


def pull(
    place: Place, name: str, checkpoints: Path, *, retry: Retry | None = None, progress: Progress | None = None
) -> Path:
    """Fetch one checkpoint into the folder `checkpoints`, verified, and return its path. One that is there is kept.

    Raises CheckpointInvalid (bytes that differ from the manifest), TransferFailed, OSError (no space here).
    """
    retry, parsed = retry or Retry(), parse_name(name)
    if parsed is None:
        raise TransferFailed(f"{name!r} is no checkpoint's name (step-<step>.<epoch>).")
    final, partial = checkpoints / name, checkpoints / partial_name(parsed)
    if final.exists():
        open_checkpoint(final)
        return final
    manifest = _manifest(place, name, retry)
    partial.mkdir(parents=True, exist_ok=True)
    missing = [record for record in manifest.files if not _is_here(partial, record)]
    counter = _Counter(manifest, missing, progress)

    def fetch(record: FileRecord) -> None:
        retry(f"Reading {place.shown(name, record.name)}", lambda: _fetch(place, name, record, partial, counter))
        check_file(partial, record)

    _each(missing, fetch)
    text = retry(f"Reading {place.shown(name, MANIFEST)}", lambda: place.fs.cat_file(place.path(name, MANIFEST)))
    with _synced(partial / MANIFEST) as file:
        file.write(text)
    fsync_directory(partial)
    open_checkpoint(partial)
    partial.rename(final)
    fsync_directory(checkpoints)
    return final


def find(place: Place, *, retry: Retry | None = None) -> tuple[Found, ...]:
    """Every entry of the place that is named like a checkpoint, newest first. Raises TransferFailed."""
    retry = retry or Retry()
    names = retry(f"Listing {place.url}", lambda: _folders(place))
    named = sorted(((parsed, name) for name in names if (parsed := parse_name(name)) is not None), reverse=True)
    return tuple(_found(place, name, parsed.step, retry) for parsed, name in named)


def _found(place: Place, name: str, step: int, retry: Retry) -> Found:
    try:
        manifest = _manifest(place, name, retry)
    except CheckpointInvalid as error:
        return Found(name=name, step=step, num_bytes=None, defect=str(error))
    there = retry(f"Listing {place.shown(name)}", lambda: _sizes(place, name))
    for record in manifest.files:
        if there.get(record.name) != record.bytes:
            has = there.get(record.name, "no")
            defect = f"{place.shown(name, record.name)} has {has} bytes, {record.bytes:,} were written"
            return Found(name=name, step=step, num_bytes=None, defect=defect)
    return Found(name=name, step=step, num_bytes=manifest.total_bytes, defect=None)


def _manifest(place: Place, name: str, retry: Retry) -> Manifest:
    """Raises CheckpointInvalid: it is missing, or no manifest of this name."""
    where = place.shown(name, MANIFEST)

    def read() -> bytes | None:
        try:
            return bytes(place.fs.cat_file(place.path(name, MANIFEST)))
        except FileNotFoundError:
            return None

    data = retry(f"Reading {where}", read)
    if data is None:
        raise CheckpointInvalid(f"{where} is not there: the folder was never completed, or is another's.")
    try:
        record = json.loads(data)
        if not isinstance(record, dict):
            raise ValueError("it holds no JSON object")
        manifest = parse_manifest(record)
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: {error}. This copy must not be used.") from error
    if any("/" in file.name for file in manifest.files):
        raise CheckpointInvalid(f"{where} lists a file outside of its folder. This copy must not be used.")
    return manifest


def _is_committed(place: Place, manifest: Manifest, name: str, retry: Retry) -> bool:
    try:
        return _manifest(place, name, retry) == manifest
    except CheckpointInvalid:  # cut off while it was written; it is written again
        return False


def _sizes(place: Place, name: str) -> dict[str, int]:
    """File name → bytes of one remote folder; nothing where it does not exist."""
    place.fs.invalidate_cache()
    try:
        entries = place.fs.ls(place.path(name), detail=True)
    except FileNotFoundError:
        return {}
    return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in entries if entry["type"] == "file"}


def _folders(place: Place) -> list[str]:
    place.fs.invalidate_cache()
    try:
        entries = place.fs.ls(place.root, detail=True)
    except FileNotFoundError:
        return []
    return [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"]


def _send(folder: Path, place: Place, record: FileRecord, counter: "_Counter") -> None:
    digest = xxhash.xxh3_128()
    target = place.path(folder.name, record.name)
    place.fs.makedirs(place.path(folder.name), exist_ok=True)
    with counter.file(record) as count, (folder / record.name).open("rb") as source, place.fs.open(target, "wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            count(len(chunk))
    if digest.hexdigest() != record.xxh3:
        place.fs.rm_file(target)
        check_file(folder, record)  # says what is wrong with it
        raise OSError(f"{folder / record.name} read differently twice")


def _fetch(place: Place, name: str, record: FileRecord, folder: Path, counter: "_Counter") -> None:
    with (
        counter.file(record) as count,
        place.fs.open(place.path(name, record.name), "rb") as source,
        _synced(folder / record.name) as out,
    ):
        while chunk := source.read(CHUNK_BYTES):
            out.write(chunk)
            count(len(chunk))


def _is_here(folder: Path, record: FileRecord) -> bool:
    try:
        check_file(folder, record)
    except CheckpointInvalid:
        return False
    return True


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on disk when the block ends without an error."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _each(records: list[FileRecord], act: Callable[[FileRecord], None]) -> None:
    """Do it for all, some at once. The first error stops those that have not begun, and is raised."""
    with ThreadPoolExecutor(max_workers=FILES_AT_ONCE, thread_name_prefix="transfer") as pool:
        try:
            for done in [pool.submit(act, record) for record in records]:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Counter:
    """Bytes done, over files that travel side by side; a file that is tried again counts once."""

    def __init__(self, manifest: Manifest, missing: list[FileRecord], progress: Progress | None) -> None:
        self._total = sum(record.bytes for record in manifest.files)
        self._done = {record.name: record.bytes for record in manifest.files if record not in missing}
        self._progress = progress

    @contextmanager
    def file(self, record: FileRecord) -> Iterator[Callable[[int], None]]:
        self._done[record.name] = 0

        def count(num_bytes: int) -> None:
            self._done[record.name] += num_bytes
            if self._progress is not None:
                self._progress(record.name, sum(self._done.values()), self._total)

        yield count
