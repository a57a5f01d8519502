"""Zstandard files as a plain stream of bytes, with a cut file told from a whole one.

The library's own reader ends quietly where the bytes end, also in the middle of a frame: a file that is still being
copied would make another data set without a word. Here every frame must come to its end.
"""

import io
from pathlib import Path
from typing import IO

import zstandard

CHUNK_BYTES = 1 << 20


class ZstdStream(io.RawIOBase):
    """The unpacked bytes of one or more frames. Raises OSError for bytes that are no frame, EOFError for a cut one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while not self._plain:
            if not self._packed:
                self._packed = self._file.read(CHUNK_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self._unpack()
        size = min(len(buffer), len(self._plain))
        buffer[:size], self._plain = self._plain[:size], self._plain[size:]
        return size

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            self._plain = self._frame.decompress(self._packed)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        # What follows the end of a frame is the next one: tools that split and join files write several.
        self._packed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        self._file.close()
        super().close()


def open_zst(path: Path) -> io.BufferedReader:
    """The unpacked bytes of a .zst file, by lines or pieces."""
    return io.BufferedReader(ZstdStream(path.open("rb")), CHUNK_BYTES)
