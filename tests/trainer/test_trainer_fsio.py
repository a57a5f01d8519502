"""write_atomic leaves the old file or the new one; read_json says what is wrong with a file."""

import os
from pathlib import Path

import pytest

from trainer.fsio import RecordUnreadable, read_json, write_atomic


def test_writes_text_and_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.json", '{"x": 1}')
    write_atomic(tmp_path / "b.bin", b"\x00\xff")
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\xff"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.bin"]


def test_replaces_a_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, '{"x": 1, "long": "text"}')
    write_atomic(path, "{}")
    assert read_json(path) == {}


def test_a_failed_write_keeps_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, '{"x": 1}')

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, '{"x": 2}')
    assert read_json(path) == {"x": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot be read"), (b"{", "is not JSON"), (b"[1]", "JSON list"), (b"\xff", "not JSON")]
)
def test_unreadable_names_the_file(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "cycle.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecordUnreadable, match=why) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
