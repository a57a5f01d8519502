"""Files are whole or absent, a claim has one winner, and nothing odd in a file's place blocks or breaks a reader."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from orchestrator.agent.cycle import read_trusted
from orchestrator.errors import PawlError
from orchestrator.state import fsio
from orchestrator.submit.plan import SECRETS_FILE
from orchestrator.submit.secrets_file import read_secrets
from orchestrator.supervise import channel


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


def damage(path: Path, how: str) -> None:
    """Put something else in the place of a file that only its owner may touch."""
    match how:
        case "not UTF-8":
            path.write_bytes(b'{"a": "\xff\xfe"}')
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path, 0o600)
        case "link":
            path.symlink_to("/etc/hostname")
        case "loop":
            path.symlink_to(path.name)
        case "others may write":
            path.write_text("{}")
            path.chmod(0o666)
            return
    if not path.is_symlink() and not path.is_dir():
        path.chmod(0o600)


READERS = {
    "record": lambda path: read_trusted(path),
    "key": lambda path: channel.read_key(path),
    "secrets": lambda path: read_secrets(path.parent.parent),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("how", ["not UTF-8", "folder", "fifo", "link", "loop", "others may write"])
def test_anything_odd_in_the_place_of_an_own_file_is_one_error_that_names_it(tmp_path, reader, how) -> None:
    path = tmp_path / SECRETS_FILE
    path.parent.mkdir()
    damage(path, how)
    with pytest.raises(PawlError) as refused:
        READERS[reader](path)
    assert str(refused.value).startswith(f"{path} ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_disk_that_fails_while_it_is_read_names_the_file(tmp_path, reader, monkeypatch) -> None:
    path = tmp_path / SECRETS_FILE
    path.parent.mkdir()
    path.write_text("A=1\n")
    path.chmod(0o600)

    def fails(*_args, **_more):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdopen", fails)
    with pytest.raises(PawlError, match=rf"{path} cannot be read: Input/output error"):
        READERS[reader](path)


@pytest.mark.parametrize("text", ["A='1\n", "A\n", "'A'\n"])
def test_a_damaged_secrets_file_is_named_and_not_quoted(tmp_path, text) -> None:
    path = tmp_path / SECRETS_FILE
    path.parent.mkdir()
    path.write_text(f"TOKEN=hunter2\n{text}")
    path.chmod(0o600)
    with pytest.raises(PawlError, match="is damaged") as refused:
        read_secrets(tmp_path)
    assert str(path) in str(refused.value) and "hunter2" not in str(refused.value)


def test_a_file_over_the_limit_is_refused(tmp_path) -> None:
    (tmp_path / "x").write_text("x" * 11)
    (tmp_path / "x").chmod(0o600)
    assert fsio.read_own(tmp_path / "x", limit=11) == "x" * 11
    with pytest.raises(PawlError, match="more than 10 bytes"):
        fsio.read_own(tmp_path / "x", limit=10)
