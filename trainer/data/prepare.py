"""Texts and a tokenizer → token folders, in one streaming pass that may be stopped at any moment.

    files ─▶ documents ─▶ batches ─tokenizer, all cores─▶ ids + eos ─▶ shard writer (every n-th document: held out)

A shard ends after a document. It is written under a temporary name and renamed when it is complete, its `.bin` last;
so the committed shards say by themselves how many documents are done, and the same command continues behind them.
`.prepare.json` only remembers with which arguments the folder was begun. metadata.json is written last.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from trainer.data.documents import Document, expand_inputs, read_documents
from trainer.data.format import METADATA, Metadata, Shard, docs_file, file_xxh3, read_metadata, token_dtype
from trainer.data.tokenizer import LoadedTokenizer
from trainer.errors import DataError, UsageError
from trainer.fsio import fsync_directory, write_atomic

BEGUN = ".prepare.json"
BATCH_CHARACTERS = 4 << 20
BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One preparation. holdout_every: every n-th document goes to holdout_out instead of out."""

    inputs: tuple[str, ...]
    text_column: str
    shard_tokens: int
    out: Path
    holdout_every: int | None = None
    holdout_out: Path | None = None


class Progress:
    """What a preparation reports while it runs; the default says nothing."""

    def advance(self, *, done_bytes: float, total_bytes: int, documents: int, tokens: int) -> None:
        """Called after each batch; `done_bytes` of `total_bytes` of the input files are read."""


def prepare(request: Request, tokenizer: LoadedTokenizer, progress: Progress | None = None) -> tuple[Metadata, ...]:
    """Make the folder(s); returns their metadata, main first. Continues a stopped preparation of the same arguments.

    Raises DataError: unreadable input. Raises UsageError: a folder of something else in the way, a text column that is
    not there, a holdout that would stay empty. After a failure, Ctrl-C included, no half file is left, and a folder
    without a complete shard is as it was before.
    """
    files = expand_inputs(request.inputs)
    identity = _identity(request, files, tokenizer)
    outs = [request.out] + ([request.holdout_out] if request.holdout_out is not None else [])
    writers: list[FolderWriter] = []
    try:
        for out in outs:
            writers.append(FolderWriter(out, tokenizer, request, identity))
        if not all(writer.finished for writer in writers):
            _write_documents(files, request, tokenizer, writers, progress or Progress())
            _refuse_empty(writers, request)
        # The main folder is finished last: whoever finds it complete finds its holdout complete too.
        return tuple(reversed([writer.finish() for writer in reversed(writers)]))
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise


def _refuse_empty(writers: Sequence["FolderWriter"], request: Request) -> None:
    empty = [writer for writer in writers if writer.documents == 0]
    if empty:
        total = sum(writer.documents for writer in writers)
        raise UsageError(
            f"{empty[0].folder} would be empty: the input has {total:,} documents in all"
            + (f" and --holdout-every is {request.holdout_every}." if request.holdout_every else ".")
        )


def _write_documents(
    files: Sequence[Path],
    request: Request,
    tokenizer: LoadedTokenizer,
    writers: Sequence["FolderWriter"],
    progress: Progress,
) -> None:
    total = sum(file.stat().st_size for file in files)
    before = dict(zip(files, np.cumsum([0, *(file.stat().st_size for file in files)]), strict=False))
    ordinal = 0
    for batch in _batches(document for file in files for document in read_documents(file, column=request.text_column)):
        todo: list[tuple[FolderWriter, str]] = []
        for document in batch:
            ordinal += 1
            held_out = request.holdout_every is not None and ordinal % request.holdout_every == 0
            writer = writers[1 if held_out else 0]
            if not writer.skip():
                todo.append((writer, document.text))
        for (writer, _), ids in zip(todo, tokenizer.encode([text for _, text in todo]), strict=True):
            writer.add(ids)
        last = batch[-1]
        progress.advance(
            done_bytes=float(before[last.file]) + last.done * last.file.stat().st_size,
            total_bytes=total,
            documents=ordinal,
            tokens=sum(writer.tokens for writer in writers),
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _identity(request: Request, files: Sequence[Path], tokenizer: LoadedTokenizer) -> dict[str, Any]:
    """What must be equal for two preparations to be one."""
    listing = json.dumps([[str(file), file.stat().st_size] for file in files])
    return {
        "input": list(request.inputs),
        "files": len(files),
        "files_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        "text_column": request.text_column,
        "shard_tokens": request.shard_tokens,
        "holdout_every": request.holdout_every,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id,
    }


class FolderWriter:
    """Writes one token folder, shard by shard; knows from the folder itself how far an earlier call came."""

    def __init__(self, folder: Path, tokenizer: LoadedTokenizer, request: Request, identity: dict[str, Any]) -> None:
        """Raises UsageError if the folder holds something else, or was begun with other arguments."""
        self.folder, self.tokenizer, self.identity = folder, tokenizer, identity
        self.shard_tokens = request.shard_tokens
        self.dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
        self._made_folder = not folder.exists()
        self.finished: Metadata | None = self._open()
        self.shards: list[Shard] = list(self.finished.shards) if self.finished else self._committed()
        self._to_skip = sum(shard.documents for shard in self.shards)
        self.documents = self._to_skip
        self.tokens = sum(shard.tokens for shard in self.shards)
        self._shard: _OpenShard | None = None

    def skip(self) -> bool:
        """Whether the next document of this folder is in a committed shard already."""
        if self._to_skip == 0:
            return False
        self._to_skip -= 1
        return True

    def add(self, ids: Sequence[int]) -> None:
        """Append one document and its end-of-document id."""
        if self._shard is None:
            self._shard = _OpenShard(self.folder, len(self.shards), self.dtype)
        self._shard.add(np.asarray([*ids, self.tokenizer.eos_id], dtype=self.dtype))
        self.documents += 1
        self.tokens += len(ids) + 1
        if self._shard.tokens >= self.shard_tokens:
            self._commit_shard()

    def finish(self) -> Metadata:
        """Commit the last shard and write metadata.json; returns what it says."""
        if self.finished is not None:
            return self.finished
        self._commit_shard()
        metadata = Metadata(
            dtype=self.dtype.name,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            num_tokens=self.tokens,
            num_documents=self.documents,
            tokenizer={"path": str(self.tokenizer.path), "sha256": self.tokenizer.sha256},
            shards=tuple(self.shards),
            source=self.identity,
        )
        write_atomic(self.folder / METADATA, json.dumps(metadata.to_json(), indent=2) + "\n")
        (self.folder / BEGUN).unlink(missing_ok=True)
        return metadata

    def abandon(self) -> None:
        """Leave complete shards, for the same command to go on behind them, and nothing else.

        Without one there is nothing to go on from: the folder is as it was, free for another command too.
        """
        if self.finished is not None:
            return
        if self._shard is not None:
            self._shard.close()
        half = [*self.folder.glob(".shard-*.tmp")]
        if not (self.folder / _shard_name(0)).exists():  # looked up: a stop may fall between the rename and its note
            half += [self.folder / docs_file(_shard_name(0)), self.folder / BEGUN]
        for file in half:
            file.unlink(missing_ok=True)
        if self._made_folder and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _open(self) -> Metadata | None:
        if (self.folder / METADATA).exists():
            metadata = read_metadata(self.folder)
            self._same(dict(metadata.source), "is a finished token folder made")
            return metadata
        self.folder.mkdir(parents=True, exist_ok=True)
        begun = self.folder / BEGUN
        if begun.exists():
            try:
                earlier = json.loads(begun.read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"{begun} is damaged ({error}). Remove {self.folder} and prepare it again.") from error
            self._same(earlier, "holds a preparation begun")
        elif any(self.folder.iterdir()):
            raise UsageError(f"{self.folder} holds other files. Choose an empty folder; nothing is overwritten.")
        else:
            write_atomic(begun, json.dumps(self.identity, indent=2) + "\n")
        return None

    def _same(self, earlier: dict[str, Any], what: str) -> None:
        different = sorted(key for key in self.identity if earlier.get(key) != self.identity[key])
        if different:
            raise UsageError(
                f"{self.folder} {what} with other arguments ({', '.join(different)} differ). "
                "Choose another --out, or remove the folder; nothing is overwritten."
            )

    def _committed(self) -> list[Shard]:
        shards: list[Shard] = []
        while (path := self.folder / _shard_name(len(shards))).exists():
            ends = np.load(self.folder / docs_file(path.name), allow_pickle=False)
            tokens = np.fromfile(path, dtype=self.dtype)
            shards.append(
                Shard(
                    file=path.name,
                    tokens=len(tokens),
                    documents=len(ends),
                    xxh3=file_xxh3(path),
                    max_id=int(tokens.max()),
                )
            )
        return shards

    def _commit_shard(self) -> None:
        if self._shard is not None:
            self.shards.append(self._shard.commit())
            self._shard = None


class _OpenShard:
    """A shard under its temporary name."""

    def __init__(self, folder: Path, index: int, dtype: "np.dtype[Any]") -> None:
        self.path = folder / _shard_name(index)
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")
        self._file: IO[bytes] = self._temporary.open("wb")
        self._digest = xxhash.xxh3_128()
        self._ends: list[int] = []
        self.tokens, self._max_id, self._dtype = 0, 0, dtype

    def add(self, tokens: "np.ndarray[Any, np.dtype[Any]]") -> None:
        data = tokens.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.tokens += len(tokens)
        self._max_id = max(self._max_id, int(tokens.max()))
        self._ends.append(self.tokens)

    def close(self) -> None:
        self._file.close()

    def commit(self) -> Shard:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        docs = self.path.with_name(docs_file(self.path.name))
        temporary = docs.with_name(f".{docs.name}.tmp")
        with temporary.open("wb") as file:
            np.save(file, np.asarray(self._ends, dtype="<u8"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(docs)
        # The .bin comes last: its name is what makes the shard count after a restart.
        self._temporary.replace(self.path)
        fsync_directory(self.path.parent)
        return Shard(
            file=self.path.name,
            tokens=self.tokens,
            documents=len(self._ends),
            xxh3=self._digest.hexdigest(),
            max_id=self._max_id,
        )


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}.bin"
