"""run.py in this process: whatever goes wrong before the loop, the rank says so in its outcome and never raises."""

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from record_factory import CYCLE

from trainer import run as run_module
from trainer.beat import CONTROL, CONTROL_AT, HEADER, HEADER_BYTES, MAGIC, RANK_STRIDE, VERSION, BeatWriter, Phase, Word
from trainer.checkpoint import saver as saver_module
from trainer.data.tokenizer import tokenizer_sha256
from trainer.engine import Engine
from trainer.errors import DesyncError
from trainer.launch import read_launch
from trainer.pipeline.compile import BlockCompiler
from trainer.replicas import Scope
from trainer.run import TrainerProcess


@pytest.fixture(autouse=True)
def _signals_stay_pytests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_module, "install_alone", lambda flag: None)
    monkeypatch.setattr(run_module, "install_supervised", lambda stacks: None)
    yield


def process(
    config: Path, run_dir: Path, *, cycle: Path | None = None, shm: Path | None = None, **env: str
) -> TrainerProcess:
    args = Namespace(config_file=config, run_dir=run_dir, cycle=cycle, shm=shm)
    return TrainerProcess(read_launch(args, env))


def outcome(trainer: TrainerProcess) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((trainer.launch.cycle_dir / "outcomes" / "rank-00000.json").read_text())
    return body


@pytest.mark.parametrize("world_size", ["1", "3", "8"])
def test_each_rank_checks_the_world_size_before_it_connects(tmp_path: Path, world_size: str) -> None:
    """S8 (pytorch-lightning#20391)."""
    trainer = process(tiny_run.make(tmp_path, dp=2), tmp_path / "run", WORLD_SIZE=world_size)
    assert trainer.run() == 78
    left = outcome(trainer)
    assert left["kind"] == "config_error"
    assert f"{world_size} ranks" in left["message"]
    assert "= 2" in left["message"]
    assert left["phase"] == "INIT"


def test_a_cycle_of_another_size_is_refused_with_all_numbers(tmp_path: Path) -> None:
    """S8 (pytorch-lightning#20391): the mesh fits what torchrun started, but the agents expect other ranks."""
    cycle = make_cycle(tmp_path / "run", 1, world_size=4, ranks_per_node=2, nodes=[*CYCLE["nodes"][:1]] * 2)
    trainer = process(tiny_run.make(tmp_path), tmp_path / "run", cycle=cycle, WORLD_SIZE="1")
    assert trainer.run() == 78
    said = outcome(trainer)["message"]
    assert "4 ranks (2 nodes × 2 ranks per node)" in said and "torchrun started 1" in said


def test_a_missing_config_file(tmp_path: Path) -> None:
    trainer = process(tmp_path / "none.yaml", tmp_path / "run")
    assert trainer.run() == 78
    assert "none.yaml" in outcome(trainer)["message"]


def test_missing_data_is_a_data_error(tmp_path: Path) -> None:
    config = tiny_run.make(tmp_path)
    (tmp_path / "data" / "b" / "metadata.json").unlink()
    trainer = process(config, tmp_path / "run")
    assert trainer.run() == 88
    assert outcome(trainer)["kind"] == "data_error"


def test_an_unreadable_cycle_is_a_crash_with_words(tmp_path: Path) -> None:
    cycle = tmp_path / "run" / "attempts" / "0001" / "cycles" / "0001" / "cycle.json"
    cycle.parent.mkdir(parents=True)
    cycle.write_text("{")
    trainer = process(tiny_run.make(tmp_path), tmp_path / "run", cycle=cycle)
    assert trainer.run() == 1
    assert "is not JSON" in outcome(trainer)["message"]


def test_an_unexpected_error_is_a_crash_with_its_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_args: object, **_named: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(run_module, "Loader", explode)
    trainer = process(tiny_run.make(tmp_path), tmp_path / "run")
    assert trainer.run() == 1
    left = outcome(trainer)
    assert (left["kind"], left["message"]) == ("crashed", "RuntimeError: out of luck")
    assert left["exception"]["frame"].endswith("in explode")


@pytest.mark.parametrize("interval", [2, 100, None])
def test_replicas_that_differ_end_the_rank_with_the_suspects_named_and_nothing_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    """Between saves, before a save, and at a save with digests off, where tied copies are compared alone."""
    scopes: list[tuple[int, Scope]] = []

    def differ(engine: Engine, *, step: int, scope: Scope) -> None:
        scopes.append((step, scope))
        raise DesyncError(f"Replicas differ after step {step}", suspects=(5,))

    for module in (run_module, saver_module):
        monkeypatch.setattr(module, "check_replicas", differ)
    path = tiny_run.make(tmp_path, interval=3)
    body = yaml.safe_load(path.read_text())
    body["parallelism"]["replica_check_interval"] = interval
    path.write_text(yaml.safe_dump(body))
    run_dir = tmp_path / "run"
    trainer = process(path, run_dir, cycle=make_cycle(run_dir, 1))
    assert trainer.run() == 91
    left = outcome(trainer)
    step = 2 if interval == 2 else 3
    assert scopes == [(step, Scope.TIED if interval is None else Scope.ALL)]
    assert (left["kind"], left["suspects"], left["step"]) == ("desync", [5], step)
    assert f"after step {step}" in left["message"] and left["checkpoint"] is None
    assert list((run_dir / "checkpoints").iterdir()) == []
    assert [line[0] for line in lines_of(trainer)] == list(range(1, step))


def test_layers_are_compiled_in_a_phase_of_its_own_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between restore and the first batch; the first line of the launch says how long it took, and no other."""
    monkeypatch.setattr("trainer.engine.BlockCompiler", partial(BlockCompiler, backend="aot_eager"))
    order: list[Phase] = []
    beat = BeatWriter.beat

    def noted(self: BeatWriter, phase: Phase | None = None, **facts: Any) -> None:
        order.extend([] if phase is None else [phase])
        beat(self, phase, **facts)

    monkeypatch.setattr(BeatWriter, "beat", noted)
    path = tiny_run.make(tmp_path, train_steps=2, interval=2)
    body = yaml.safe_load(path.read_text())
    body["model"]["compile"] = "block"
    path.write_text(yaml.safe_dump(body))
    trainer = process(path, tmp_path / "run", cycle=make_cycle(tmp_path / "run", 1))
    assert trainer.run() == 0
    assert order[order.index(Phase.RESTORE) :][:3] == [Phase.RESTORE, Phase.COMPILE, Phase.DATA]
    assert order.count(Phase.COMPILE) == 1
    text = (trainer.launch.cycle_dir / "train.jsonl").read_text()
    first, second = (json.loads(line)["compile_s"] for line in text.splitlines())
    assert first > 0 and second is None


def make_cycle(run_dir: Path, number: int, **changes: Any) -> Path:
    folder = run_dir / "attempts" / "0001" / "cycles" / f"{number:04d}"
    folder.mkdir(parents=True)
    epoch = {"attempt": 1, "generation": 1, "cycle": number}
    alone: dict[str, Any] = {
        "world_size": 1,
        "ranks_per_node": 1,
        "resume_from": None,
        "skip_windows": [],
        "epoch": epoch,
    }
    (folder / "cycle.json").write_text(json.dumps({**CYCLE, **alone, **changes}))
    return folder / "cycle.json"


def test_a_run_that_diverges_stops_before_it_harms_itself(tmp_path: Path) -> None:
    config = tiny_run.make(tmp_path, interval=1)
    config.write_text(config.read_text().replace("learning_rate: 0.01", "learning_rate: 1.0e+37"))
    trainer = process(config, tmp_path / "run", cycle=make_cycle(tmp_path / "run", 1))
    assert trainer.run() == 86
    left = outcome(trainer)
    assert (left["kind"], left["phase"]) == ("nonfinite", "STEP")
    assert f"Step {left['step'] + 1} is not finite" in left["message"]
    assert left["checkpoint"] == f"step-{left['step']:09d}.a0001g01c0001", "the last good state is kept"


def test_a_window_of_the_cycle_is_passed_over_and_remembered(tmp_path: Path) -> None:
    config, run_dir = tiny_run.make(tmp_path, interval=3), tmp_path / "run"
    first = process(config, run_dir, cycle=make_cycle(run_dir, 1, skip_windows=[[2, 3]]))
    assert first.run() == 0
    lines = [json.loads(line) for line in (first.launch.cycle_dir / "train.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [None, "skip_window", "skip_window", None, None, None]
    assert [line["consumed_samples"] for line in lines] == [4, 8, 12, 16, 20, 24]
    again = process(config, run_dir, cycle=make_cycle(run_dir, 2, resume_from="step-000000003.a0001g01c0001"))
    assert again.run() == 0
    resumed = [json.loads(line) for line in (again.launch.cycle_dir / "train.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in resumed] == [line["loss"] for line in lines[3:]]
    manifest = json.loads((run_dir / "checkpoints" / "step-000000006.a0001g01c0002" / "manifest.json").read_text())
    assert manifest["state"]["skip_windows"] == [[2, 3]]
    assert manifest["state"]["adam_t"] == 4


def test_a_checkpoint_records_the_config_the_run_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = tiny_run.make(tmp_path), tmp_path / "run"
    started_with, trainer = config.read_text(), process(config, run_dir)
    restore = trainer.restore

    def edited_meanwhile(*args: Any) -> Any:
        config.unlink()
        return restore(*args)

    monkeypatch.setattr(trainer, "restore", edited_meanwhile)
    assert trainer.run() == 0
    kept = [path.read_text() for path in (run_dir / "checkpoints").glob("*/config.yaml")]
    assert kept == [started_with] * 2


def with_tokenizer(config: Path) -> Path:
    """A tokenizer.json beside the config, and the section that names it."""
    folder = config.parent / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    config.write_text(config.read_text() + f"tokenizer: {{tokenizer_name_or_path: {folder}}}\n")
    return folder / "tokenizer.json"


def test_the_tokenizer_is_read_once_and_every_checkpoint_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that fails at a save, on one node, must not be asked: the save would fail there alone."""
    config, run_dir = tiny_run.make(tmp_path), tmp_path / "run"
    file, trainer = with_tokenizer(config), process(config, run_dir)
    digest, restore = tokenizer_sha256(file), trainer.restore

    def gone_meanwhile(*args: Any) -> Any:
        file.unlink()
        return restore(*args)

    monkeypatch.setattr(trainer, "restore", gone_meanwhile)
    assert trainer.run() == 0
    manifests = [json.loads(path.read_text()) for path in (run_dir / "checkpoints").glob("*/manifest.json")]
    assert [manifest["tokenizer"] for manifest in manifests] == [{"path": str(file.parent), "sha256": digest}] * 2


def test_a_tokenizer_that_cannot_be_read_is_a_config_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run.make(tmp_path)
    with_tokenizer(config)

    def unreadable(file: Path) -> str:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("trainer.checkpoint.save.tokenizer_sha256", unreadable)
    trainer = process(config, tmp_path / "run")
    assert trainer.run() == 78
    said = outcome(trainer)["message"]
    assert "tokenizer.tokenizer_name_or_path" in said and "Permission denied" in said


def test_save_now_saves_at_the_next_border_and_trains_on(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    header = bytearray(
        HEADER.pack(MAGIC, VERSION, 1, RANK_STRIDE, HEADER_BYTES).ljust(HEADER_BYTES + RANK_STRIDE, b"\0")
    )
    CONTROL.pack_into(header, CONTROL_AT, 1, Word.SAVE)
    shm.write_bytes(header)
    run_dir = tmp_path / "run"
    trainer = process(tiny_run.make(tmp_path), run_dir, cycle=make_cycle(run_dir, 1), shm=shm)
    assert trainer.run() == 0
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert saved == [f"step-{step:09d}.a0001g01c0001" for step in (1, 3, 6)]


def test_a_disk_that_takes_no_outcome_does_not_keep_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_module, "write_outcome", full)
    assert process(tmp_path / "none.yaml", tmp_path / "run").run() == 78


def test_a_cycle_of_another_size_is_refused(tmp_path: Path) -> None:
    cycle = tmp_path / "run" / "attempts" / "0001" / "cycles" / "0001" / "cycle.json"
    cycle.parent.mkdir(parents=True)
    cycle.write_text(json.dumps(CYCLE))
    trainer = process(tiny_run.make(tmp_path), tmp_path / "run", cycle=cycle)
    assert trainer.run() == 78
    assert "cycle.json says 2 ranks (1 nodes × 2 ranks per node)" in outcome(trainer)["message"]


COSINE = {"lr_warmup_steps": 2, "lr_decay_style": "cosine", "min_decay_lr": 0.001}
WSD = {"lr_warmup_steps": 2, "lr_decay_style": "1-sqrt", "lr_decay_starting_step": 4, "lr_decay_steps": 2}
RAMP = [{"from_samples": 0, "global_batch_size": 2}, {"from_samples": 3, "global_batch_size": 4}]
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cosine and weight decay": (COSINE, {"weight_decay_schedule": {"end_value": 3.0, "style": "cosine"}}, {}),
    "wsd and batch size": (WSD, {}, {"batch_size_ramp": RAMP}),
    "constant": ({"lr_warmup_steps": 2, "lr_decay_style": "constant"}, {}, {}),
}


def lines_of(trainer: TrainerProcess) -> list[tuple[Any, ...]]:
    """What a step computed, bit for bit, by step."""
    keys = ("step", "consumed_samples", "num_valid", "lr", "loss", "grad_norm", "model_flops")
    text = (trainer.launch.cycle_dir / "train.jsonl").read_text()
    return [tuple(json.loads(line)[key] for key in keys) for line in text.splitlines()]


@pytest.mark.parametrize("change", CHANGES)
def test_r7_a_run_that_goes_on_has_the_rates_of_one_that_never_stopped(change: str, tmp_path: Path) -> None:
    """R7, R1, R2: saved inside warm-up, plateau, decay and ramp, and resumed."""
    scheduler, optimizer, tokens = CHANGES[change]
    path, run_dir = tiny_run.make(tmp_path, interval=1), tmp_path / "run"
    body = yaml.safe_load(path.read_text())
    body["optimizer"] = {"learning_rate_scheduler": {"learning_rate": 0.01, **scheduler}, "weight_decay": 0.1}
    body["optimizer"] |= optimizer
    body["tokens"] |= tokens
    del body["data"]["validation"]
    path.write_text(yaml.safe_dump(body))
    straight = process(path, run_dir, cycle=make_cycle(run_dir, 1))
    assert straight.run() == 0
    expected = lines_of(straight)
    samples = [2, 2, 4, 4, 4, 4] if tokens else [4] * 6
    assert [line[1:3] for line in expected] == [
        (consumed, n * tiny_run.SEQUENCE) for consumed, n in zip(accumulate(samples), samples, strict=True)
    ]
    for cycle, step in enumerate((1, 3, 5), start=2):
        name = f"step-{step:09d}.a0001g01c0001"
        resumed = process(path, run_dir, cycle=make_cycle(run_dir, cycle, resume_from=name))
        assert resumed.run() == 0
        assert lines_of(resumed) == expected[step:]
