"""Checkpoints behind a URL: a push or a pull that is cut off anywhere leaves nothing that counts, and goes on later."""

import errno
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_world import flip_byte, make_specs, save_world
from crash_shim import Operation, fails, kill_at_each, shim
from fsspec.implementations.memory import MemoryFileSystem

from trainer.checkpoint.remote import Place, Retry, TransferFailed, find, open_place, pull, push
from trainer.checkpoint.verify import problems
from trainer.cli import main
from trainer.errors import CheckpointInvalid
from trainer.mesh.topology import Topology

MESH = Topology(dp=2, pp=1, tp=1)
SPECS = make_specs(MESH, tied=True)
ONCE = Retry(tries=1)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_world(tmp_path / "source", SPECS, MESH)


@pytest.fixture
def memory() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A real S3 protocol on this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ENDPOINT_URL", endpoint)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
    yield "s3://bucket/run"
    server.stop()


def check_there_and_back(url: str, source: Path, tmp_path: Path) -> None:
    place = open_place(url)
    assert find(place) == ()
    seen: list[tuple[str, int, int]] = []
    manifest, sent = push(source, place, progress=lambda *now: seen.append(now))
    assert sent == manifest.total_bytes + (source / "manifest.json").stat().st_size
    assert seen[-1][1:] == (manifest.total_bytes, manifest.total_bytes)
    (found,) = find(place)
    assert (found.name, found.step, found.defect, found.num_bytes) == (source.name, 40, None, manifest.total_bytes)
    assert push(source, place)[1] == 0, "what is there is not sent again"
    back = pull(place, source.name, tmp_path / "back")
    assert problems(back) == () and files_of(back) == files_of(source)
    assert pull(place, source.name, tmp_path / "back") == back


def test_to_memory_and_back(memory: str, source: Path, tmp_path: Path) -> None:
    check_there_and_back(memory, source, tmp_path)


def test_to_another_folder_and_back(source: Path, tmp_path: Path) -> None:
    check_there_and_back(f"file://{tmp_path}/there", source, tmp_path)


def test_to_s3_and_back(s3: str, source: Path, tmp_path: Path) -> None:
    check_there_and_back(s3, source, tmp_path)


def test_a_push_killed_at_any_operation_leaves_nothing_that_counts_and_the_next_completes_it(
    tmp_path: Path, source: Path
) -> None:
    counted: list[int] = []

    def check(there: Path, died_at: Operation | None) -> None:
        place = open_place(f"file://{there}")
        whole = [found for found in find(place) if found.defect is None]
        counted.append(len(whole))
        assert not whole or files_of(there / source.name) == files_of(source)
        push(source, place, retry=ONCE)
        assert [found.defect for found in find(place)] == [None]
        assert files_of(there / source.name) == files_of(source)

    def again(there: Path) -> None:
        push(source, open_place(f"file://{there}"), retry=ONCE)

    died = kill_at_each(lambda at: tmp_path / f"there{at}", again, check)
    of_manifest = [number for number, operation in enumerate(died) if "manifest.json" in operation.path]
    assert of_manifest and of_manifest == list(range(of_manifest[0], len(died))), "it is written last"
    assert len(died) > 10 and counted == [0] * len(died) + [1]


def test_a_pull_killed_at_any_operation_leaves_no_checkpoint_and_goes_on(tmp_path: Path, source: Path) -> None:
    place = open_place(f"file://{tmp_path}/there")
    push(source, place)

    def check(here: Path, died_at: Operation | None) -> None:
        final = here / source.name
        assert not final.exists() or problems(final) == ()
        assert problems(pull(place, source.name, here)) == ()

    def fetch(here: Path) -> None:
        pull(place, source.name, here, retry=ONCE)

    died = kill_at_each(lambda at: tmp_path / f"here{at}", fetch, check)
    assert len(died) > 10


class Unsteady(MemoryFileSystem):
    """A store whose every second request fails, as one does that throttles."""

    cachable = False
    requests = 0

    def _ask(self) -> None:
        type(self).requests += 1
        if type(self).requests % 2:
            raise ConnectionError("503 Slow Down")

    def ls(self, path: str, detail: bool = True, **rest: Any) -> Any:
        self._ask()
        return super().ls(path, detail=detail, **rest)

    def _open(self, path: str, *args: Any, **rest: Any) -> Any:
        self._ask()
        return super()._open(path, *args, **rest)


def test_a_store_that_fails_now_and_then_is_tried_again_with_growing_waits(
    memory: str, source: Path, tmp_path: Path
) -> None:
    waits: list[float] = []
    place = Place(url=memory, fs=Unsteady(), root="/bucket/run")
    retry = Retry(tries=6, first_wait_s=1.0, sleep=waits.append)
    push(source, place, retry=retry)
    assert waits and set(waits) <= {1.0, 2.0, 4.0, 8.0, 16.0}
    assert problems(pull(place, source.name, tmp_path / "back", retry=retry)) == ()
    with pytest.raises(TransferFailed, match=r"failed 1 times.*503 Slow Down"):
        for _ in range(2):
            find(place, retry=ONCE)


def test_a_damaged_source_is_named_and_its_copy_never_counts(memory: str, source: Path) -> None:
    flip_byte(source / "rank-00001.safetensors", 300)
    with pytest.raises(CheckpointInvalid, match="rank-00001") as caught:
        push(source, open_place(memory))
    assert caught.value.bad_file == source / "rank-00001.safetensors"
    (found,) = find(open_place(memory))
    assert found.defect is not None and "manifest.json is not there" in found.defect


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "manifest"])
def test_a_damaged_copy_is_not_complete_or_does_not_arrive(
    damage: str, memory: str, source: Path, tmp_path: Path
) -> None:
    place = open_place(memory)
    push(source, place)
    path = place.path(source.name, "manifest.json" if damage == "manifest" else "rank-00000.safetensors")
    data = place.fs.cat_file(path)
    if damage == "gone":
        place.fs.rm_file(path)
    else:
        place.fs.pipe_file(path, data[:-9] if damage == "cut" else data[:-9] + b"z" + data[-8:])
    (found,) = find(place)
    assert (found.defect is None) == (damage == "flipped"), "the sizes of all files are seen from afar, bytes are not"
    with pytest.raises((CheckpointInvalid, TransferFailed)):
        pull(place, source.name, tmp_path / "back", retry=ONCE)
    assert not (tmp_path / "back" / source.name).exists()
    push(source, place)  # sizes tell; a flipped byte in a copy is found by the pull alone
    if damage != "flipped":
        assert problems(pull(place, source.name, tmp_path / "back")) == ()


def test_a_full_disk_here_is_an_error_of_this_place(memory: str, source: Path, tmp_path: Path) -> None:
    place = open_place(memory)
    push(source, place)
    with (
        shim(tmp_path / "back", at=4, act=fails(errno.ENOSPC)),
        pytest.raises((TransferFailed, OSError), match="space"),
    ):
        pull(place, source.name, tmp_path / "back", retry=ONCE)
    assert not (tmp_path / "back" / source.name).exists()


def test_the_command_line(memory: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "ls", memory]) == 0 and "no checkpoint" in capsys.readouterr().out
    assert main(["transfer", "pull", memory, str(tmp_path / "back")]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    assert main(["transfer", "push", str(source), memory, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == source.name
    assert main(["transfer", "push", str(source), memory]) == 0 and "there already" in capsys.readouterr().out
    assert main(["transfer", "ls", memory]) == 0 and "step 40" in capsys.readouterr().out
    assert main(["transfer", "pull", memory, str(tmp_path / "back")]) == 0
    assert files_of(tmp_path / "back" / source.name) == files_of(source)
    assert main(["transfer", "push", str(tmp_path), memory]) == 92 and "no checkpoint's name" in capsys.readouterr().err
    assert main(["transfer", "ls", "nowhere://x"]) == 92
    assert "nowhere" in capsys.readouterr().err
