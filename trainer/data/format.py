"""The token folder: what `data prepare` writes and the loader maps.

    metadata.json          the description below; written last, so a folder without it is not finished
    shard-00000.bin        token ids, uint16 or uint32, little-endian, documents joined, each ended by eos_id
    shard-00000.docs.npy   uint64, where each document of the shard ends (exclusive, in tokens)

A source is the concatenation of its shards. Ids fit uint16 up to a vocabulary of 65,536 entries, added tokens counted.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainer.errors import DataError

SCHEMA_VERSION = 1
METADATA = "metadata.json"
CHUNK_BYTES = 1 << 20

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file pair. max_id: the largest token id in it, None where the writer did not say."""

    file: str
    tokens: int
    documents: int
    xxh3: str
    max_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """metadata.json. tokenizer: {path, sha256}; source: how the folder was made, for people."""

    dtype: str
    vocab_size: int
    eos_id: int
    num_tokens: int
    num_documents: int
    tokenizer: Mapping[str, Any]
    shards: tuple[Shard, ...]
    source: Mapping[str, Any]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadId:
    """A token id the vocabulary does not hold. offset: in tokens from the start of `file`."""

    file: Path
    offset: int
    token_id: int


def token_dtype(vocab_size: int) -> str:
    """The narrowest id type for `vocab_size` ids, added tokens included: 'uint16' up to 65,536, else 'uint32'."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def docs_file(shard_file: str) -> str:
    return shard_file.removesuffix(".bin") + ".docs.npy"


def file_xxh3(path: Path) -> str:
    """XXH3-128 of a file as hex, read in pieces that stay in the cache."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def read_metadata(folder: Path) -> Metadata:
    """Read and check metadata.json. Raises DataError: not a finished token folder of this version."""
    path = folder / METADATA
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(_not_a_folder(folder)) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read as JSON ({error}). Make the folder again with `data prepare`."
        ) from error
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION:
        raise DataError(f"{path} is not metadata of version {SCHEMA_VERSION}, the one this program reads.")
    try:
        return _metadata(record)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise DataError(f"{path} lacks or contradicts a field ({error!r}). Make the folder again.") from error


def _metadata(record: Mapping[str, Any]) -> Metadata:
    fields = ("file", "tokens", "documents", "xxh3")
    shards = tuple(
        Shard(**{key: shard[key] for key in fields}, max_id=shard.get("max_id")) for shard in record["shards"]
    )
    # A name with a separator would let a copied folder point at any file of the machine.
    assert all(Path(shard.file).name == shard.file for shard in shards), "a shard's file is not a plain name"
    assert record["dtype"] in ("uint16", "uint32"), f"dtype {record['dtype']}"
    assert sum(shard.tokens for shard in shards) == record["num_tokens"], "num_tokens is not the sum over shards"
    return Metadata(
        dtype=record["dtype"],
        vocab_size=int(record["vocab_size"]),
        eos_id=int(record["eos_id"]),
        num_tokens=int(record["num_tokens"]),
        num_documents=int(record["num_documents"]),
        tokenizer=record["tokenizer"],
        shards=shards,
        source=record["source"],
    )


def _not_a_folder(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"The token folder {folder} does not exist on this machine. Check the path, or make it with `data prepare`."
        )
    return (
        f"{folder} has no {METADATA}: it is not a token folder, or `data prepare` has not finished there. "
        "Run the same `data prepare` command again; it continues where it stopped."
    )


class TokenSource:
    """The tokens of one folder as one sequence, memory-mapped. Opening it checks sizes and reads no token."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder)
        self._dtype = np.dtype(self.metadata.dtype).newbyteorder("<")
        self._starts = np.cumsum([0, *(shard.tokens for shard in self.metadata.shards)])
        self._maps: dict[int, Tokens] = {}
        self._ends: list[NDArray[np.uint64]] = []
        for shard in self.metadata.shards:
            self._check_size(shard)

    def __len__(self) -> int:
        return self.metadata.num_tokens

    @property
    def num_bytes(self) -> int:
        return len(self) * self._dtype.itemsize

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) as int64, over shard borders. Raises DataError if a file went away."""
        assert start >= 0 and start + count <= len(self)
        pieces = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while count > 0:
            first = start - int(self._starts[shard])
            piece = self.shard(shard)[first : first + count]
            pieces.append(piece.astype(np.int64))
            start, count, shard = start + len(piece), count - len(piece), shard + 1
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def document_starts(self, start: int, count: int) -> NDArray[np.int64]:
        """Places i, 0 < i < count, where token start + i is the first of a document. Raises DataError.

        The document indices of the shards must have been opened before, by `open_documents`.
        """
        found = []
        first = max(0, int(np.searchsorted(self._starts, start, side="right")) - 1)
        last = int(np.searchsorted(self._starts, start + count, side="left"))
        for shard in range(first, last):
            offset, ends = int(self._starts[shard]), self._ends[shard]
            low, high = np.searchsorted(ends, np.asarray([start - offset + 1, start - offset + count]).clip(0))
            found.append(ends[low:high].astype(np.int64) + (offset - start))
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def open_documents(self) -> None:
        """Map the document indices of all shards. Raises DataError where one is missing or of another shard."""
        for shard in self.metadata.shards:
            path = self.folder / docs_file(shard.file)
            try:
                # Without allow_pickle=False a crafted .npy would run code while it is being loaded.
                ends = np.load(path, mmap_mode="r" if shard.documents else None, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(
                    f"The document index {path} cannot be read ({error}), and tokens.document_masks needs it. Restore "
                    "it, or prepare the folder again."
                ) from error
            if ends.ndim != 1 or len(ends) != shard.documents or (len(ends) and int(ends[-1]) != shard.tokens):
                raise DataError(
                    f"The document index {path} does not end at the shard's {shard.tokens:,} tokens after "
                    f"{shard.documents:,} documents: it belongs to another shard. Prepare the folder again."
                )
            self._ends.append(ends)

    def locate(self, token: int) -> tuple[Path, int]:
        """(file, offset in tokens inside it) of the token-th token: what an error message needs."""
        shard = int(np.searchsorted(self._starts, token, side="right")) - 1
        return self.folder / self.metadata.shards[shard].file, token - int(self._starts[shard])

    def shard(self, shard: int) -> Tokens:
        """The tokens of one shard, mapped and not read. Raises DataError if the file went away."""
        if self.metadata.shards[shard].tokens == 0:
            return np.empty(0, np.uint16)
        if shard not in self._maps:
            path = self.folder / self.metadata.shards[shard].file
            try:
                self._maps[shard] = np.memmap(path, dtype=self._dtype, mode="r")
            except (OSError, ValueError) as error:
                raise DataError(
                    f"The token shard {path} cannot be opened ({error}). Restore it, or prepare it again."
                ) from error
        return self._maps[shard]

    def _check_size(self, shard: Shard) -> None:
        path = self.folder / shard.file
        expected = shard.tokens * self._dtype.itemsize
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            has = (
                "is missing"
                if found is None
                else f"has {found:,} bytes (it ends at token {found // self._dtype.itemsize:,})"
            )
            raise DataError(
                f"The token shard {path} {has}, and {METADATA} says {expected:,} bytes. "
                "Copy it again, or make the folder again with `data prepare`."
            )


def first_bad_id(source: TokenSource, vocab_size: int, *, trust_declared: bool = False) -> BadId | None:
    """The first id ≥ vocab_size in stored order, or None. Reads every shard once.

    trust_declared: skip the shards whose metadata name a max_id below vocab_size.
    """
    for index, shard in enumerate(source.metadata.shards):
        if trust_declared and shard.max_id is not None and shard.max_id < vocab_size:
            continue
        for offset, tokens in _chunks(source, index):
            bad = np.flatnonzero(tokens >= vocab_size)
            if bad.size:
                at = int(bad[0])
                return BadId(file=source.folder / shard.file, offset=offset + at, token_id=int(tokens[at]))
    return None


def _chunks(source: TokenSource, shard: int) -> Iterator[tuple[int, Tokens]]:
    tokens = source.shard(shard)
    step = CHUNK_BYTES // 2
    for offset in range(0, len(tokens), step):
        yield offset, tokens[offset : offset + step]


def bad_id_error(bad: BadId, vocab_size: int) -> DataError:
    return DataError(
        f"{bad.file} holds the token id {bad.token_id} at token offset {bad.offset:,}, and the model's vocabulary has "
        f"{vocab_size:,} entries (ids 0 to {vocab_size - 1:,}). Set model.model_config.vocab_size to the tokenizer's "
        "full size, added tokens included, or prepare the data with the model's tokenizer."
    )


def verify(source: TokenSource) -> tuple[str, ...]:
    """What is wrong with the folder, one sentence each: digests, document borders, ids. Reads everything."""
    problems = []
    for shard in source.metadata.shards:
        path = source.folder / shard.file
        if file_xxh3(path) != shard.xxh3:
            problems.append(f"{path}: the content does not match its xxh3 digest in {METADATA}")
        problems.extend(_document_problems(source.folder / docs_file(shard.file), shard))
    bad = first_bad_id(source, source.metadata.vocab_size)
    if bad is not None:
        problems.append(str(bad_id_error(bad, source.metadata.vocab_size)))
    return tuple(problems)


def _document_problems(path: Path, shard: Shard) -> Iterator[str]:
    try:
        # Without allow_pickle=False a crafted .npy would run code while it is being loaded.
        ends = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        yield f"{path}: cannot be read ({error})"
        return
    if (
        len(ends) != shard.documents
        or (len(ends) and int(ends[-1]) != shard.tokens)
        or np.any(np.diff(ends.astype(np.int64)) <= 0)
    ):
        yield f"{path}: the document ends do not rise to the shard's {shard.tokens:,} tokens"
