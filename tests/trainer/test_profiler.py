"""Recorded steps: which ones, on which ranks, what is written, and that neither a number nor the run depends on it."""

import gzip
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml

from trainer.beat import HEADER, HEADER_BYTES, MAGIC, PROFILE, PROFILE_AT, RANK_STRIDE, VERSION, Phase, open_beats
from trainer.config.model import Profiler
from trainer.launch import Launch
from trainer.profiler import StepProfiler, planned_window, write_trace
from trainer.records import Epoch
from trainer.run import TrainerProcess

EPOCH = Epoch(attempt=1, generation=1, cycle=1)


@dataclass
class Recorder:
    """Stands for torch's recorder; `broken` is the call that fails."""

    broken: str = ""
    calls: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    phase: Callable[[], Phase] = lambda: Phase.SAVE
    text: str = '{"traceEvents": []}'

    def __call__(self, config: Profiler) -> "Recorder":
        if self.broken == "make":
            raise RuntimeError("no recorder today")
        return self

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.phases.append(self.phase())
        if name == self.broken:
            raise RuntimeError("no recorder today")

    def start(self) -> None:
        self._call("start")

    def stop(self) -> None:
        self._call("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._call("export")
        Path(path).write_text(self.text)


@pytest.fixture(autouse=True)
def _signals_stay_pytests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.run.install_alone", lambda flag: None)


class World:
    """A StepProfiler with its beats; `train` runs steps as the loop does and returns those that were recorded."""

    def __init__(self, folder: Path, config: Profiler | None = None, *, rank: int = 0, broken: str = "") -> None:
        self.recorder = Recorder(broken)
        self.beats = open_beats(None, epoch=EPOCH, rank=rank, local_rank=rank)
        self.recorder.phase = lambda: self.beats.phase
        self.waits: list[Phase] = []
        self.folder = folder / "profile"
        self.profiler = StepProfiler(
            config, rank=rank, epoch_text=EPOCH.text, folder=self.folder, beats=self.beats, recorder=self.recorder,
            wait=lambda: self.waits.append(self.beats.phase),
        )  # fmt: skip

    def ask(self, seq: int, steps: int, ranks: int = 0b1) -> None:
        PROFILE.pack_into(self.beats._memory, PROFILE_AT, seq, steps, ranks)

    def train(self, first: int, last: int, *, others: Callable[[int], bool] = lambda step: True) -> list[int]:
        """others: whether the other ranks know of the wish at a step."""
        covered = []
        with self.profiler as profiler:
            for step in range(first, last + 1):
                with profiler.step(step):
                    wish = profiler.wish()
                    covered += [step] * profiler.covers(step)
                    self.beats.beat(Phase.STEP)
                profiler.finish(step)
                profiler.agree(step, wish if others(step) else 0)
        return covered

    @property
    def written(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())


def test_the_configs_window_is_recorded_once_on_its_ranks(tmp_path: Path) -> None:
    world = World(tmp_path, Profiler(first_step=3, num_steps=2))
    assert world.train(1, 8) == [3, 4]
    assert world.written == [f"step-000000003.a0001g01c0001/rank-00000.{end}" for end in ("json.gz", "txt")]
    assert world.recorder.calls == ["start", "stop", "export"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asked", [True, False])
def test_no_rank_sits_in_step_while_one_begins_or_writes(rank: int, asked: bool, tmp_path: Path) -> None:
    world = World(tmp_path, None if asked else Profiler(first_step=3, num_steps=2), rank=rank)
    if asked:
        world.ask(1, 2)
    world.train(1, 8, others=lambda step: step >= 2)
    assert world.waits == [Phase.SAVE] * 2, "all wait at both ends; the limit of a step is short"
    assert set(world.recorder.phases) <= {Phase.SAVE}


def test_a_rank_that_does_not_record_waits_for_those_that_do(tmp_path: Path) -> None:
    world = World(tmp_path, Profiler(first_step=3, num_steps=2, ranks=[0, 2]), rank=1)
    assert world.train(1, 8) == [3, 4], "gradient norms by block are taken by all ranks"
    assert world.recorder.calls == [] and len(world.waits) == 2 and world.written == []


@pytest.mark.parametrize(
    ("ranks", "records"), [("all", [True] * 3), ([0], [True, False, False]), ([1, 7], [False, True, False])]
)
def test_which_ranks_record(ranks: Any, records: list[bool]) -> None:
    windows = [planned_window(Profiler(ranks=ranks), rank) for rank in range(3)]
    assert [window.records for window in windows if window is not None] == records
    assert planned_window(None, 0) is None


def test_a_resume_inside_the_window_records_what_is_left_and_one_behind_it_nothing(tmp_path: Path) -> None:
    inside = World(tmp_path, Profiler(first_step=3, num_steps=4))
    assert inside.train(5, 9) == [5, 6]
    assert inside.written[0].startswith("step-000000005.")
    assert World(tmp_path / "b", Profiler(first_step=3, num_steps=4)).train(7, 9) == []


def test_a_window_that_the_run_cuts_short_is_written(tmp_path: Path) -> None:
    world = World(tmp_path, Profiler(first_step=3, num_steps=50))
    assert world.train(1, 4) == [3, 4]
    assert len(world.written) == 2 and world.waits == [Phase.SAVE] * 2


def test_an_error_in_a_step_is_not_hidden_and_nothing_waits_for_its_trace(tmp_path: Path) -> None:
    world = World(tmp_path, Profiler(first_step=1))
    with pytest.raises(ValueError, match="of the step"), world.profiler as profiler, profiler.step(1):
        raise ValueError("of the step")
    assert world.recorder.calls == ["start", "stop"] and len(world.waits) == 1 and world.written == []


def test_a_wish_waits_until_all_ranks_know_of_it_and_is_done_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.ask(1, 2)
    assert world.train(1, 9, others=lambda step: step >= 4) == [5, 6]
    assert world.beats._beat.profile_ack == 1 and len(world.written) == 2
    assert world.train(10, 14) == [], "acknowledged"
    world.ask(2, 1, ranks=0b10)
    assert world.train(15, 18) == [16] and world.beats._beat.profile_ack == 2
    assert len(world.written) == 2, "rank 1 was asked for, this is rank 0"


def test_a_wish_during_the_configs_window_comes_after_it(tmp_path: Path) -> None:
    world = World(tmp_path, Profiler(first_step=2, num_steps=3))
    world.ask(1, 2)
    assert world.train(3, 9, others=lambda step: step >= 4) == [3, 4, 6, 7]
    assert [name.split(".")[0] for name in world.written[::2]] == ["step-000000003", "step-000000006"]


@pytest.mark.parametrize("broken", ["make", "start", "stop", "export"])
def test_a_recorder_that_fails_costs_a_warning(broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = World(tmp_path, Profiler(first_step=1, num_steps=2), broken=broken)
    world.ask(1, 1)
    world.train(1, 5)
    said = capsys.readouterr().err
    assert said.count("no recorder today") == 2 and "steps 1 to 2" in said and "Training goes on" in said
    assert str(world.folder) in said
    assert world.beats._beat.profile_ack == 1 and len(world.waits) == 4, "a failed rank still meets the others"
    assert [path for path in tmp_path.rglob(".*")] == [], "nothing half-written stays"


def test_a_trace_that_the_disk_cut_off_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cut off"):
        write_trace(Recorder(text='{"traceEvents": [{"na'), tmp_path / "rank-00000.json.gz", title="t")
    with pytest.raises(OSError, match="cut off"):
        write_trace(Recorder(text=""), tmp_path / "rank-00000.json.gz", title="t")
    assert list(tmp_path.iterdir()) == []


def test_a_removed_run_directory_does_not_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    World(tmp_path / "gone", Profiler(first_step=1)).train(1, 3)
    assert not (tmp_path / "gone").exists() and "No such file" in capsys.readouterr().err


def run_with(
    tmp_path: Path, name: str, *, shm: Path | None = None, **sections: Any
) -> tuple[Path, list[dict[str, Any]]]:
    """A run of six steps: its directory and its lines."""
    path, run_dir = tiny_run.make(tmp_path, name), tmp_path / f"run-{name}"
    body = yaml.safe_load(path.read_text())
    body["logging"] |= sections.pop("logging", {})
    path.write_text(yaml.safe_dump({**body, **sections}))
    launch = Launch(
        config_file=path, run_dir=run_dir, cycle_file=None, shm=shm, rank=0, local_rank=0, world_size=1, node="n",
        restart="0",
    )  # fmt: skip
    assert TrainerProcess(launch).run() == 0
    return run_dir, [json.loads(line) for line in (launch.cycle_dir / "train.jsonl").read_text().splitlines()]


def numbers(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["loss"].hex(), line["grad_norm"].hex()) for line in lines]


def test_recording_changes_no_bit_and_leaves_a_trace_of_exactly_its_steps(tmp_path: Path) -> None:
    _, quiet = run_with(tmp_path, "quiet")
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    run_dir, lines = run_with(tmp_path, "profiled", profiler={"first_step": 2, "num_steps": 2, **options})
    assert numbers(lines) == numbers(quiet)
    folder = run_dir / "profile" / "step-000000002.a0000g00c0000"
    trace = json.loads(gzip.decompress((folder / "rank-00000.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
    assert sum(name == "aten::mm" for name in names) > 50
    assert "aten::mm" in (folder / "rank-00000.txt").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.json.gz", "rank-00000.txt"]


def test_gradient_norms_by_block_are_logged_at_their_interval_and_in_a_window(tmp_path: Path) -> None:
    _, quiet = run_with(tmp_path, "quiet")
    _, lines = run_with(
        tmp_path, "logged", logging={"grad_norms_interval": 3}, profiler={"first_step": 1, "num_steps": 1}
    )
    assert numbers(lines) == numbers(quiet) and all(line["grad_norms"] is None for line in quiet)
    logged = {line["step"]: line["grad_norms"] for line in lines if line["grad_norms"] is not None}
    assert list(logged) == [1, 3, 6]
    for step, norms in logged.items():
        assert list(norms) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
        whole = lines[step - 1]["grad_norm"]
        assert math.isclose(sum(norm**2 for norm in norms.values()), whole**2, rel_tol=1e-12)


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run-full").mkdir()
    (tmp_path / "run-full" / "profile").write_text("in the way")
    run_with(tmp_path, "full", profiler={"first_step": 2, "num_steps": 2})
    assert "steps 2 to 3 could not be written" in capsys.readouterr().err


def test_an_agents_request_is_recorded_and_acknowledged(tmp_path: Path) -> None:
    header = bytearray(
        HEADER.pack(MAGIC, VERSION, 1, RANK_STRIDE, HEADER_BYTES).ljust(HEADER_BYTES + RANK_STRIDE, b"\0")
    )
    PROFILE.pack_into(header, PROFILE_AT, 1, 2, 0b1)
    shm = tmp_path / "shm"
    shm.write_bytes(header)
    run_dir, lines = run_with(tmp_path, "asked", shm=shm)
    assert [line["step"] for line in lines if line["grad_norms"]] == [2, 3]
    assert sorted(path.name for path in (run_dir / "profile").iterdir()) == ["step-000000002.a0000g00c0000"]
