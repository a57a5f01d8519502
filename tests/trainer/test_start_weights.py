"""model.init_method.path: a fresh run starts from another checkpoint's weights, and from nothing else of it."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
import yaml
from checkpoint_world import empty_rank, filled_rank, flip_byte, make_specs, save_world
from engine_world import solo_engine, tiny_batch, tiny_config

from trainer import run as run_module
from trainer.checkpoint.match import misfit, other_numbers
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.checkpoint.weights import fill_weights, load_weights
from trainer.config import Severity
from trainer.config.check import check
from trainer.config.model import Config
from trainer.engine import Engine
from trainer.errors import ConfigError
from trainer.launch import read_launch
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.run import TrainerProcess

MESHES = [Topology(), Topology(dp=2), Topology(tp=4), Topology(pp=3), Topology(dp=2, pp=2, tp=2)]


def save(engine: Engine, folder: Path, *, step: int = 5) -> Path:
    state = RunState(step=step, consumed_samples=9, consumed_tokens=99, adam_t=step)
    saved = save_checkpoint(
        engine, state, checkpoints_dir=folder, epoch="a0001g01c0001", run="other", config_text="", tokenizer=None
    )
    return folder / saved.name


def fresh(config: Config) -> Engine:
    return Engine(config, ParallelContext(Topology(), device=torch.device("cpu")), bucket_numel=2048)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_any_mesh_takes_the_weights_and_has_zero_moments(zero_stage: int, tmp_path: Path) -> None:
    writer = Topology(dp=2, tp=2)
    checkpoint = open_checkpoint(save_world(tmp_path, make_specs(writer, tied=True), writer))
    for mesh in MESHES:
        specs = make_specs(mesh, tied=True)
        for rank in range(mesh.world_size):
            shards = empty_rank(specs, mesh, rank, zero_stage=zero_stage)
            fill_weights(checkpoint, shards)
            right = filled_rank(specs, mesh, rank, zero_stage=zero_stage)
            for (state, bucket), tensor in shards.tensors.items():
                wanted = right.tensors[state, bucket]
                assert torch.equal(tensor, wanted if state == "master" else torch.zeros_like(wanted)), (mesh, rank)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_model_is_the_other_runs_and_the_optimizer_is_new(dtype: str, tmp_path: Path) -> None:
    """From fp32 masters into each precision; fp64 holds fp32 exactly."""
    trained = solo_engine(tiny_config())
    trained.train_step(tiny_batch(), lr=0.01, weight_decay=0.1, adam_t=1)
    path = save(trained, tmp_path)
    engine = fresh(tiny_config(dtype=dtype))
    assert load_weights(path, engine) == ()
    for spec in trained.specs:
        weight = trained.optimizer.view(spec.name)[0]
        assert torch.equal(engine.optimizer.view(spec.name)[0], weight.to(engine.precision.compute)), spec.name
    for (state, _), tensor in engine.state_shards().items():
        assert state == "master" or not tensor.any()


def test_another_shape_is_one_error_that_names_the_tensor(tmp_path: Path) -> None:
    path = save(solo_engine(tiny_config(tied=True)), tmp_path)
    with pytest.raises(ConfigError, match=r"init_method.path: .* not of the model .* lm_head.weight .*has none.*67×32"):
        load_weights(path, fresh(tiny_config(tied=False)))
    with pytest.raises(ConfigError, match=r"the first is model.embed_tokens.weight: checkpoint 67×32, config 68×32"):
        load_weights(path, fresh(tiny_config(vocab=68)))


@pytest.mark.parametrize("file", ["index.json", "manifest.json", "rank-00000.safetensors"])
def test_a_damaged_start_is_a_config_error_that_names_the_file(file: str, tmp_path: Path) -> None:
    """Not 'checkpoint invalid': nobody is to look for an older checkpoint of this run."""
    path = save(solo_engine(tiny_config()), tmp_path)
    flip_byte(path / file, (path / file).stat().st_size // 2)
    with pytest.raises(ConfigError, match=rf"init_method\.path: .*{file}"):
        load_weights(path, fresh(tiny_config()))


def test_what_else_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"Hugging Face folder.*pawl import"):
        load_weights(tmp_path / "hf", fresh(tiny_config()))
    with pytest.raises(ConfigError, match="is not a directory"):
        load_weights(tmp_path / "none", fresh(tiny_config()))


def test_other_factors_and_constants_are_told(tmp_path: Path) -> None:
    path = save(solo_engine(tiny_config(use_mup=True)), tmp_path)
    notes = load_weights(path, fresh(tiny_config()))
    assert [note.split()[0] for note in notes] == ["attention_scale", "output_multiplier"]
    config = tiny_config(use_mup=True)
    longer = config.model.model_config_.model_copy(update={"rope_theta": 5e5})
    model = type(config.model)(model_config=longer, init_method=config.model.init_method)
    (note,) = other_numbers(open_checkpoint(path), config.model_copy(update={"model": model}))
    assert note.startswith("rope is") and "rope_theta=500000.0" in note and "rope_theta=10000.0" in note


@pytest.fixture
def _signals_stay_pytests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run_module, "install_alone", lambda flag: None)
    yield


def train(config: Path, run_dir: Path) -> list[dict[str, Any]]:
    """A run in this process; its lines."""
    trainer = TrainerProcess(read_launch(Namespace(config_file=config, run_dir=run_dir, cycle=None, shm=None), {}))
    assert trainer.run() == 0
    return [json.loads(line) for line in (trainer.launch.cycle_dir / "train.jsonl").read_text().splitlines()]


def start_from(config: Path, path: Path, name: str, **tokens: int) -> Path:
    body = yaml.safe_load(config.read_text())
    body["model"]["init_method"] = {"path": str(path)}
    body["tokens"].update(tokens)
    out = config.with_name(f"{name}.yaml")
    out.write_text(yaml.safe_dump(body))
    return out


@pytest.mark.usefixtures("_signals_stay_pytests")
def test_a_run_starts_at_step_0_with_these_weights_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its learning rate and data are those of a run from nothing; it resumes from its own checkpoints alone."""
    config = tiny_run.make(tmp_path, train_steps=4, interval=2)
    first = train(config, tmp_path / "first")
    (source,) = (tmp_path / "first" / "checkpoints").glob("step-000000004.*")
    second = train(start_from(config, source, "second"), tmp_path / "second")
    assert "starts at step 0 from the weights of" in capfd.readouterr().out
    same = ("step", "lr", "consumed_samples")
    assert [[line[key] for key in same] for line in second] == [[line[key] for key in same] for line in first]
    assert [line["loss"] for line in second] != [line["loss"] for line in first]
    source.rename(source.with_name("gone"))
    longer = train(start_from(config, source, "second", train_steps=6), tmp_path / "second")
    assert [line["step"] for line in longer][-2:] == [5, 6]


def test_check_looks_for_the_folder_and_compares_it(tmp_path: Path) -> None:
    config = tiny_run.make(tmp_path)
    missing = start_from(config, tmp_path / "none", "missing")
    laptop, here = (
        [p for p in check(missing, here=here).problems if p.key == "model.init_method.path"] for here in (False, True)
    )
    assert [p.severity for p in laptop] == [Severity.UNCHECKED] and [p.severity for p in here] == [Severity.ERROR]
    path = save(solo_engine(tiny_config()), tmp_path)
    found = [p for p in check(start_from(config, path, "other")).problems if p.key == "model.init_method.path"]
    assert [p.severity for p in found] == [Severity.ERROR]
    assert "the first is model.embed_tokens.weight: checkpoint 67×32, config 61×32" in found[0].message


def test_misfit_is_silent_for_the_same_model(tmp_path: Path) -> None:
    engine = solo_engine(tiny_config())
    assert misfit(open_checkpoint(save(engine, tmp_path)), engine.specs) is None
