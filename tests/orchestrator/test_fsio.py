"""Files are whole or absent, a claim has one winner, and nothing odd in a file's place blocks or breaks a reader."""

import os
import stat
import threading
from pathlib import Path

import pytest

from orchestrator.state import fsio


def test_a_write_replaces_whole_with_the_asked_mode(tmp_path: Path) -> None:
    path = tmp_path / "a b\n$(id)"
    old = os.umask(0o077)
    try:
        fsio.write_atomic(path, "one")
        fsio.write_atomic(path, "two", durable=False)
        fsio.write_atomic(tmp_path / "secret", "x", mode=0o600)
    finally:
        os.umask(old)
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_write_leaves_the_old_text_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    fsio.write_atomic(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        fsio.write_atomic(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_reading_answers_none_for_everything_that_is_no_text_file(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "big").write_text("x" * 100)
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    for name in ("absent", "bytes", "loop", "fifo", ".", "nul\0"):
        assert fsio.read_text(tmp_path / name) is None
    assert fsio.read_text(tmp_path / "big", limit=99) is None
    assert fsio.read_text(tmp_path / "big", limit=100) == "x" * 100


def test_listing_tells_absent_from_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fsio.list_names(tmp_path / "absent") == ()
    assert fsio.list_names(tmp_path / "file") is None
    assert fsio.list_names(tmp_path) == ("file",)


def test_one_of_many_wins_a_claim(tmp_path: Path) -> None:
    path, won = tmp_path / "claim", []
    barrier = threading.Barrier(8)

    def attempt(number: int) -> None:
        barrier.wait()
        if fsio.claim(path, str(number)):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number) for number in won] == [path.read_text()]
    assert [entry.name for entry in tmp_path.iterdir()] == ["claim"]


def test_a_claim_that_nfs_answered_twice_is_still_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer makes the client ask again, and the second answer is EEXIST: the link is ours all the same."""
    real = os.link

    def twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", twice)
    assert fsio.claim(tmp_path / "claim", "me")
    monkeypatch.setattr(os, "link", real)
    assert not fsio.claim(tmp_path / "claim", "you")


def test_an_append_closes_the_torn_line_of_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("one\ntw")
    fsio.append_line(path, "three")
    assert path.read_text() == "one\ntw\nthree\n"
