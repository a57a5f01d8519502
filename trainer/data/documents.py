"""Documents out of the files people have: plain text, JSON lines (also .gz, .zst) and parquet.

    *.txt                            one document a file
    *.jsonl, *.jsonl.gz, *.jsonl.zst one document a line, in the text column
    *.parquet                        one document a row, in the text column

The order is that of the arguments, files of a folder sorted by path: the same on every machine, so that a stopped
preparation continues where it was. A line that cannot be read stops the work with file and line; skipping it in
silence would make the next run another data set.
"""

import glob
import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from trainer.data.zst import open_zst
from trainer.errors import DataError, UsageError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and where it came from. done: share of its file read when it was complete, 0 to 1."""

    text: str
    file: Path
    done: float


def expand_inputs(inputs: Sequence[str]) -> tuple[Path, ...]:
    """All input files of files, folders (searched whole) and patterns, in reading order. Raises UsageError."""
    files: list[Path] = []
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
        elif path.is_file():
            found = [path]
        else:
            found = [Path(name) for name in sorted(glob.glob(given, recursive=True)) if Path(name).is_file()]
        if not found:
            raise UsageError(
                f"--input {given}: no file of a known kind ({', '.join(SUFFIXES)}) is there. Check the path."
            )
        files += found
    strange = [file for file in files if not file.name.endswith(SUFFIXES)]
    if strange:
        raise UsageError(f"--input {strange[0]}: unknown kind of file; known are {', '.join(SUFFIXES)}.")
    return tuple(dict.fromkeys(files))


def read_documents(file: Path, *, column: str) -> Iterator[Document]:
    """The documents of one file in stored order, empty ones left out.

    Raises DataError with file and line; UsageError where the text column is not there.
    """
    try:
        if file.name.endswith(".txt"):
            texts = _whole_text(file)
        elif file.name.endswith(".parquet"):
            texts = _parquet_rows(file, column)
        else:
            texts = _json_lines(file, column)
        for text, done in texts:
            if text:
                yield Document(text=text, file=file, done=done)
    except (OSError, EOFError, zlib.error) as error:  # zlib.error: a gzip file with other bytes in its middle
        raise DataError(
            f"{file}: cannot be read ({error}). Check the file; it may be cut or still being copied."
        ) from error


def _whole_text(file: Path) -> Iterator[tuple[str, float]]:
    try:
        yield file.read_text(encoding="utf-8"), 1.0
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: is not UTF-8 (byte {error.start:,} is 0x{error.object[error.start]:02x}). Convert it first, for "
            "example with iconv."
        ) from error


def _json_lines(file: Path, column: str) -> Iterator[tuple[str, float]]:
    size = max(1, file.stat().st_size)
    read = 0
    with _open_lines(file) as lines:
        for number, line in enumerate(lines, start=1):
            read += len(line)
            if line.strip():
                # The plain size is unknown for compressed files; they count when they are finished.
                yield _text_of(line, column, where=f"{file}, line {number:,}"), min(1.0, read / size)


def _open_lines(file: Path) -> AbstractContextManager[IO[bytes]]:
    if file.name.endswith(".gz"):
        return cast(AbstractContextManager[IO[bytes]], gzip.open(file, "rb"))
    return open_zst(file) if file.name.endswith(".zst") else file.open("rb")


def _text_of(line: bytes, column: str, *, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({error}).") from error
    if not isinstance(record, dict) or column not in record:
        has = ", ".join(sorted(map(str, record))) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"{where}: has no field {column!r} (it has: {has}). Name the right one with --text-column.")
    return _text(record[column], column, where=where)


def _text(value: object, column: str, *, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {column!r} is {type(value).__name__}, not text. See --text-column.")
    return value


def _parquet_rows(file: Path, column: str) -> Iterator[tuple[str, float]]:
    # Imported here: arrow takes longer to load than most text files to read.
    parquet: Any = importlib.import_module("pyarrow.parquet")
    arrow: Any = importlib.import_module("pyarrow")
    try:
        table = parquet.ParquetFile(file)
    except arrow.ArrowInvalid as error:
        raise DataError(f"{file}: is not a parquet file ({error}).") from error
    if column not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise UsageError(f"{file}: has no column {column!r} (it has: {names}). Name the right one with --text-column.")
    row, rows = 0, max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_size=1024, columns=[column]):
        for value in batch.column(0).to_pylist():
            row += 1
            yield _text(value, column, where=f"{file}, row {row:,}"), row / rows
