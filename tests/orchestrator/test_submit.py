"""The run directory is made whole or not at all, and a name is never used twice."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import launch_cases as cases
import pytest

from orchestrator.errors import PawlError, UsageError
from orchestrator.state.ledger import read_all
from orchestrator.state.provenance import collect_provenance
from orchestrator.state.records import LaunchFacts, parse_launch_facts
from orchestrator.state.retention import Retention
from orchestrator.state.rundir import RunPaths
from orchestrator.submit import submit
from orchestrator.submit.secrets_file import read_secrets, split_secrets, write_secrets


def new_run(*, run: str = "demo", secret: dict[str, str] | None = None, keep_last: int = 2) -> submit.NewRun:
    return submit.NewRun(
        facts=cases.make_facts(run=run),
        config_text="general: {run: demo}\n",
        secret_env=secret or {},
        provenance={"schema_version": 1},
        run_created={"run": run, "world_size": 8},
        retention=Retention(keep_last=keep_last),
    )


def test_a_run_directory_starts_complete(tmp_path: Path) -> None:
    paths = submit.make_run(tmp_path / "runs", new_run(), writer="cli-x")
    assert paths.root == tmp_path / "runs" / "demo"
    assert paths.config.read_text() == "general: {run: demo}\n"
    facts = parse_launch_facts(paths.launch_facts.read_text())
    assert isinstance(facts, LaunchFacts) and facts == cases.make_facts()
    assert [event.kind for event in read_all(paths.root)] == ["run_created"]
    assert paths.control.stat().st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / "runs") == ["demo"]


def test_an_existing_name_is_never_overwritten(tmp_path: Path) -> None:
    paths = submit.make_run(tmp_path, new_run(), writer="cli-x")
    before = {path: path.stat().st_mtime_ns for path in paths.root.rglob("*")}
    with pytest.raises(UsageError, match=r"pawl resume demo.*general\.run") as error:
        submit.make_run(tmp_path, new_run(), writer="cli-y")
    assert error.value.exit_code == 2
    assert {path: path.stat().st_mtime_ns for path in paths.root.rglob("*")} == before


def test_a_dangling_link_of_that_name_counts_as_taken(tmp_path: Path) -> None:
    (tmp_path / "demo").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists already"):
        submit.make_run(tmp_path, new_run(), writer="cli-x")


def test_two_submits_at_once_end_in_one_run(tmp_path: Path) -> None:
    results: list[str] = []
    barrier = threading.Barrier(4)

    def one(number: int) -> None:
        barrier.wait()
        try:
            submit.make_run(tmp_path, new_run(), writer=f"cli-{number}")
            results.append("made")
        except UsageError:
            results.append("refused")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["made", "refused", "refused", "refused"]
    assert os.listdir(tmp_path) == ["demo"]
    assert len(read_all(tmp_path / "demo")) == 1


_RACER = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_submit import new_run
from orchestrator.errors import UsageError
from orchestrator.submit import submit
root = Path(sys.argv[1])
(root / ("ready-" + sys.argv[3])).touch()
while not (root / "go").exists():
    pass
try:
    submit.make_run(root / "runs", new_run(secret={"API_TOKEN": sys.argv[3]}), writer="cli-" + sys.argv[3])
except UsageError as error:
    print(error)
    sys.exit(2 if "exists already" in str(error) else 1)
print("made")
"""


def test_of_several_processes_that_submit_one_name_exactly_one_makes_the_run(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environ = {**os.environ, "PYTHONPATH": f"{here.parent}:{here}"}
    command = [sys.executable, "-c", _RACER, str(tmp_path), str(here)]
    racers = [
        subprocess.Popen([*command, str(number)], env=environ, stdout=subprocess.PIPE, text=True) for number in range(4)
    ]
    while len(list(tmp_path.glob("ready-*"))) < len(racers):
        assert all(racer.poll() is None for racer in racers)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    ends = sorted((racer.wait(timeout=60), str(racer.communicate()[0])) for racer in racers)
    assert [code for code, _ in ends] == [0, 2, 2, 2], ends
    assert os.listdir(tmp_path / "runs") == ["demo"], "nothing half made"
    (event,) = read_all(tmp_path / "runs" / "demo")
    winner = read_secrets(tmp_path / "runs" / "demo")["API_TOKEN"]
    assert event.writer == f"cli-{winner}", "one run, all of one process"


_CALLS = ("open", "mkdir", "rename", "replace", "fsync", "write", "fchmod")


class Disk:
    """os calls that fail with ENOSPC from the `fails_at`-th on, as those of a full disk; `calls` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None, only_once: bool = False) -> None:
        self.calls, self.fails_at, self.only_once = 0, fails_at, only_once
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Looking is always possible: only what makes or changes something fails.
            if name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
                self.calls += 1
                hit = self.fails_at is not None and (
                    self.calls == self.fails_at if self.only_once else self.calls >= self.fails_at
                )
                if hit:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call


def _num_steps(root: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, fails_at=None)
        submit.make_run(root, new_run(secret={"API_TOKEN": "x"}), writer="cli-x")
    shutil.rmtree(root / "demo")
    return disk.calls


@pytest.mark.parametrize("only_once", [True, False])
def test_a_disk_that_fills_at_any_step_of_a_submit_leaves_nothing_half_made(tmp_path: Path, only_once: bool) -> None:
    steps = _num_steps(tmp_path)
    assert steps > 20
    for step in range(2, steps + 1):  # the first makes the folder of runs, which is there
        root = tmp_path / f"at-{step}"
        root.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            Disk(patch, fails_at=step, only_once=only_once)
            with pytest.raises(PawlError, match="could not be written: No space left on device") as error:
                submit.make_run(root, new_run(secret={"API_TOKEN": "x"}), writer="cli-x")
        assert error.value.exit_code == 1 and str(error.value).count("\n") == 0
        assert os.listdir(root) == [], f"step {step}"
        assert submit.make_run(root, new_run(), writer="cli-x").root == root / "demo"


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-rf", "a/b", "a\nb", " a", "a ", "x" * 129, "a\u202eb"])
def test_names_that_are_no_folder_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"general\.run"):
        submit.run_folder(tmp_path, name)


@pytest.mark.parametrize("name", ['a"b', "it's", "$(touch x)", "ä b", "run-1.7b_v2"])
def test_odd_names_are_taken_literally(name: str, tmp_path: Path) -> None:
    submit.make_run(tmp_path, new_run(run=name), writer="cli-x")
    assert os.listdir(tmp_path) == [name]


def test_too_little_room_says_how_much_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10, 0, 2_500_000))
    with pytest.raises(
        PawlError, match=r"2 kept and 1 being written at 1\.0 MiB each need 2\.9 MiB, free are 2\.4 MiB"
    ):
        submit.make_run(tmp_path / "runs", new_run(), writer="cli-x")
    assert os.listdir(tmp_path) == []
    submit.check_place(tmp_path / "runs", new_run(keep_last=1))


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PawlError, match="--runs-root") as error:
        submit.make_run(tmp_path / "file" / "runs", new_run(), writer="cli-x")
    assert error.value.exit_code == 1


@pytest.mark.parametrize("broken", ["write_atomic", "write_secrets", "make_layout"])
def test_a_failure_half_way_leaves_nothing(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(submit, broken)

    def full(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(submit, broken, full)
    with pytest.raises(PawlError, match="No space left on device"):
        submit.make_run(tmp_path, new_run(secret={"HF_TOKEN": "x"}), writer="cli-x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", [OSError(28, "No space left on device"), PawlError("no"), KeyboardInterrupt()])
def test_what_else_goes_into_a_run_goes_in_before_it_has_its_name_or_nothing_is_left(
    what: BaseException, tmp_path: Path
) -> None:
    def fill(paths: RunPaths, writer: str) -> None:
        assert paths.config.is_file() and writer == "cli-x" and os.listdir(tmp_path) == [paths.root.name]
        (paths.checkpoints / "half").mkdir()
        raise what

    with pytest.raises(PawlError if isinstance(what, OSError) else type(what)):
        submit.make_run(tmp_path, new_run(), writer="cli-x", fill=fill)
    assert os.listdir(tmp_path) == []
    kept = submit.make_run(tmp_path, new_run(), writer="cli-x", fill=lambda paths, _: (paths.root / "more").mkdir())
    assert (kept.root / "more").is_dir()


def test_secrets_are_in_one_file_of_mode_0600_and_nowhere_else(tmp_path: Path) -> None:
    """X6 (labs-molt#128)."""
    secret = {"WANDB_API_KEY": "hunter2 'q'", "HF_TOKEN": "$(id)"}
    paths = submit.make_run(tmp_path, new_run(secret=secret), writer="cli-x")
    holders = [path for path in paths.root.rglob("*") if path.is_file() and "hunter2" in path.read_text()]
    assert [path.stat().st_mode & 0o777 for path in holders] == [0o600]
    assert read_secrets(paths.root) == secret


def test_a_secrets_file_that_others_may_touch_is_refused(tmp_path: Path) -> None:
    path = write_secrets(tmp_path, {"HF_TOKEN": "x"})
    assert path is not None
    path.chmod(0o640)
    with pytest.raises(PawlError, match="chmod 600"):
        read_secrets(tmp_path)


def test_no_secrets_no_file(tmp_path: Path) -> None:
    assert write_secrets(tmp_path, {}) is None
    assert read_secrets(tmp_path) == {}
    assert os.listdir(tmp_path) == []


def test_secret_names_are_told_from_harmless_ones() -> None:
    names = [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "aws_secret_access_key",
        "DB_PASSWORD",
        "NCCL_DEBUG",
        "TOKENIZERS_PARALLELISM",
    ]
    harmless, secret = split_secrets(dict.fromkeys(names, "v"))
    assert list(harmless) == ["NCCL_DEBUG", "TOKENIZERS_PARALLELISM"]
    assert list(secret) == names[:4]


def test_provenance_names_code_and_hides_secrets(tmp_path: Path) -> None:
    """X6 (labs-molt#128)."""
    config = tmp_path / "run.yaml"
    config.write_text("general: {}\n")
    overrides = ("slurm.env.HF_TOKEN=hf_abc", "slurm.env={WANDB_API_KEY: hunter2}", "tokens.train_steps=5")
    record = collect_provenance(config_path=config, overrides=overrides, workdir=tmp_path, now_unix=1.0)
    assert record["overrides"] == ["slurm.env.HF_TOKEN=***", "slurm.env=***", "tokens.train_steps=5"]
    assert record["git"] is None and record["versions"]["torch"]
    assert not any(word in json.dumps(record) for word in ("hf_abc", "hunter2"))
