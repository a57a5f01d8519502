"""An export is a self-contained folder: transformers loads it offline, with the logits of the trained weights."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from checkpoint_world import empty_rank, facts, flip_byte, make_spec
from engine_world import logits_of
from hf_world import KINDS as FROM_TRANSFORMERS
from hf_world import make_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.checkpoint.naming import CheckpointName, partial_name
from trainer.checkpoint.save import begin, commit, model_record, tokenizer_record, write_rank
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.cli import main
from trainer.config.architecture import ModelConfig
from trainer.config.model import (
    Config,
    Data,
    Dataset,
    General,
    InitMethod,
    LearningRateScheduler,
    Model,
    Optimizer,
    Parallelism,
    Tokens,
)
from trainer.convert.cast import cast
from trainer.convert.export_hf import export_hf
from trainer.convert.fold import folded_factor, folding_note
from trainer.convert.hf_model import ConvertError
from trainer.convert.import_hf import import_hf
from trainer.convert.names import TABLES, from_hf, to_hf
from trainer.convert.shards import plan_shards
from trainer.data.batch import StepBatch
from trainer.data.tokenizer import save_tokenizer, train_bpe
from trainer.engine import Engine
from trainer.errors import CheckpointInvalid
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.models.families import FAMILIES
from trainer.mup import BASE_FAN_IN
from trainer.pipeline.schedule import Placement

VOCAB = 300
TEXT = [f"the pawl lets the ratchet turn only forward {i} {i * i}" for i in range(60)]


def make_config(*, tied: bool, dtype: str, use_mup: bool = False, head_dim: int = 16, **kind) -> Config:
    """A Llama, or another kind, whose head_dim is not hidden / heads, with grouped kv heads and its own rope_theta."""
    shape = ModelConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        rope_theta=5000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        **kind,
    )
    return Config(
        general=General(project="test", run="export", seed=3),
        parallelism=Parallelism(dp=1, pp=1, tp=1),
        model=Model(model_config=shape, dtype=dtype, init_method=InitMethod(std=0.3, use_mup=use_mup)),
        optimizer=Optimizer(learning_rate_scheduler=LearningRateScheduler(learning_rate=1e-3)),
        tokens=Tokens(sequence_length=16, train_steps=1, micro_batch_size=2, batch_accumulation_per_replica=1),
        data=Data(dataset=Dataset(dataset_folder=["unused"])),
    )


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("tok") / "tokenizer"
    save_tokenizer(train_bpe(iter(TEXT), vocab_size=VOCAB), out)
    return out


def save_random(folder: Path, *, tied=True, dtype="float32", tokenizer=None, **model) -> SimpleNamespace:
    """A checkpoint of a randomly drawn model, and what that model says of 2 samples of 16 tokens."""
    engine = Engine(make_config(tied=tied, dtype=dtype, **model), ParallelContext(Topology()))
    engine.init_weights()
    draw_vectors(engine)
    saved = save_checkpoint(
        engine,
        RunState(step=1, consumed_samples=2, consumed_tokens=32, adam_t=1),
        checkpoints_dir=folder,
        epoch="a0001g01c0001",
        run="export",
        config_text="general: {}\n",
        tokenizer=tokenizer_record(tokenizer),
    )
    ids = torch.arange(32).reshape(1, 2, 16) * 7 % VOCAB
    batch = StepBatch(
        input_ids_MBT=ids,
        labels_MBT=(ids + 1) % VOCAB,
        position_ids_MBT=torch.arange(16).expand(1, 2, 16),
        sample_ids=(0, 1),
    )
    return SimpleNamespace(path=folder / saved.name, engine=engine, batch=batch, loss_sum=engine.eval_loss(batch)[0])


def draw_vectors(engine: Engine) -> None:
    """Norms and biases that are not 1 and 0, or a tensor in the wrong place would not be seen."""
    generator = torch.Generator().manual_seed(8)
    for spec in engine.specs:
        if len(spec.shape) == 1:
            value = 1 + torch.randn(spec.shape, generator=generator, dtype=engine.precision.master) / 3
            engine.optimizer.load_weight(spec.name, value)


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.arange(32).reshape(2, 16) * 7 % 300
    logits = model(ids).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ((ids + 1) % 300).flatten(), reduction="sum")
    return {
        "loss_sum": loss.item(), "dtype": str(model.dtype), "not_loaded": [sorted(map(str, info[key])) for key in (
            "missing_keys", "unexpected_keys", "mismatched_keys")],
        "class": type(model).__name__, "eos": model.config.eos_token_id,
        "text": tokenizer.decode(tokenizer("the pawl")["input_ids"]),
        "generated": len(model.generate(ids[:1, :4], max_new_tokens=3, do_sample=False, eos_token_id=None)[0]),
    }

print(json.dumps([load(folder) for folder in sys.argv[1:]]))
"""


def load_in_fresh_process(folders: list[Path], home: Path) -> list[dict]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(home)}
    words = [sys.executable, "-c", LOAD, *map(str, folders)]
    return json.loads(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)


def passed_through(kind: str, root: Path, tokenizer_dir: Path) -> tuple[Path, Path]:
    """A model of transformers with a tokenizer, in and out again in bf16: both folders."""
    make_model(kind, dtype=torch.bfloat16, vocab_size=VOCAB).save_pretrained(root / "in")
    shutil.copytree(tokenizer_dir, root / "in", dirs_exist_ok=True)
    import_hf(root / "in", root / "ckpt")
    shutil.move(root / "ckpt", root / "moved")  # its tokenizer moves with it
    export_hf(root / "moved", root / "out")
    return root / "in", root / "out"


def test_transformers_loads_exports_offline_in_a_fresh_process(tokenizer_dir, tmp_path):
    """C13 (open-instruct#1809), W5: model, tokenizer and all; of runs, and of imported models of every family."""
    shards = {"tied": 10**9, "untied": 20_000}
    losses = {}
    for name, shard in shards.items():
        run = save_random(tmp_path / name, tied=name == "tied", tokenizer=str(tokenizer_dir))
        done = export_hf(run.path, tmp_path / name / "out", max_shard_bytes=shard)
        losses[name] = run.loss_sum
        files = sorted(path.name for path in (tmp_path / name / "out").glob("*.safetensors"))
        index = tmp_path / name / "out" / "model.safetensors.index.json"
        if name == "tied":
            assert files == ["model.safetensors"] and not index.exists()
        else:
            record = json.loads(index.read_text())
            assert len(files) > 2 and sorted(set(record["weight_map"].values())) == files
            assert record["metadata"]["total_size"] == done.num_bytes == 4 * done.num_parameters
    pairs = [passed_through(kind, tmp_path / kind, tokenizer_dir) for kind in FROM_TRANSFORMERS]
    folders = [*(tmp_path / name / "out" for name in losses), *(folder for pair in pairs for folder in pair)]
    found = load_in_fresh_process(folders, tmp_path / "hf_home")
    for (name, loss), got in zip(losses.items(), found, strict=False):
        assert got["loss_sum"] == pytest.approx(loss, abs=1e-4 * 32), name
        assert (got["dtype"], got["class"], got["eos"]) == ("torch.float32", "LlamaForCausalLM", 0)
    for kind, before, after in zip(FROM_TRANSFORMERS, found[2::2], found[3::2], strict=True):
        assert before == after, kind
        family = FAMILIES[kind.split()[0]]
        assert (after["dtype"], after["class"], after["eos"]) == ("torch.bfloat16", family.architecture, 2), kind
    for folder, got in zip(folders, found, strict=True):
        assert got["not_loaded"] == [[], [], []], folder
        assert got["text"] == "the pawl" and got["generated"] == 7, folder


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_written_once_and_is_the_master_bit_for_bit(tied, tmp_path):
    """W5."""
    run = save_random(tmp_path, tied=tied)
    export_hf(run.path, tmp_path / "hf")
    weights = {
        slot.name: run.engine.optimizer.view(slot.name)[0] for b in run.engine.layout.buckets for slot in b.slots
    }
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {from_hf(name, "llama") for name in file.keys()} == set(weights)  # noqa: SIM118
        assert ("lm_head.weight" in weights) == (not tied)
        for name, weight in weights.items():
            assert torch.equal(file.get_tensor(to_hf(name, "llama")), weight)


def test_bfloat16_is_kept_and_equals_the_weights_that_were_trained(tmp_path):
    run = save_random(tmp_path, dtype="bfloat16")
    export_hf(run.path, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        for bucket in run.engine.layout.buckets:
            for slot in bucket.slots:
                assert torch.equal(file.get_tensor(slot.name), run.engine.optimizer.view(slot.name)[0])


def test_the_config_says_everything_that_changes_the_numbers(tmp_path):
    run = save_random(tmp_path)
    export_hf(run.path, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    wanted = {"head_dim": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "vocab_size": VOCAB}
    assert {key: config[key] for key in wanted} == wanted
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert config["tie_word_embeddings"] is True and config["bos_token_id"] is None


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_mup_is_folded_so_that_transformers_computes_the_same_logits(dtype, tied, tmp_path):
    """A Llama knows neither 1/d in the attention nor an output multiplier; a head size of 12 makes √d no power of 2."""
    run = save_random(tmp_path, dtype=dtype, tied=tied, use_mup=True, head_dim=12)
    before = (run.path / "rank-00000.safetensors").read_bytes()
    done = export_hf(run.path, tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config = LlamaConfig.from_pretrained(tmp_path / "hf")
    model = reference.build(config, tensors, getattr(torch, dtype))
    with torch.no_grad():
        theirs = model(input_ids=run.batch.input_ids_MBT[0]).logits.double()
    ours = logits_of(run.engine, run.batch)[0].double()
    assert torch.allclose(
        ours, theirs, rtol=0, atol=(1e-10 if dtype == "float64" else 1e-4) * float(theirs.abs().max())
    )
    assert len(done.notes) == 2 and "muP is folded" in done.notes[1]
    assert (run.path / "rank-00000.safetensors").read_bytes() == before, "the checkpoint keeps what is trained"


KINDS = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with attention biases": {"attention_bias": True},
    "qwen2": {"model_type": "qwen2", "head_dim": 8},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True},
}


@pytest.mark.parametrize("use_mup", [False, True], ids=["standard", "mup"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model_is_loaded_whole_and_has_its_logits(kind, use_mup, tmp_path):
    """muP's factor on the queries goes behind a norm that would undo it."""
    run = save_random(tmp_path, dtype="float64", use_mup=use_mup, **KINDS[kind])
    done = export_hf(run.path, tmp_path / "hf")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded).__name__ == loaded.config.architectures[0] and loaded.config.model_type in kind
    model = reference.build(loaded.config, loaded.state_dict(), torch.float64)
    with torch.no_grad():
        theirs = model(input_ids=run.batch.input_ids_MBT[0]).logits
    ours = logits_of(run.engine, run.batch)[0]
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-10 * float(theirs.abs().max()))
    assert any(("q_norm ×" if "qwen3" in kind else "q_proj ×") in note for note in done.notes) == use_mup
    assert {to_hf(spec.name, loaded.config.model_type) for spec in run.engine.specs} <= set(loaded.state_dict())


def test_folding_needs_both_factors_and_only_them(tmp_path):
    """Which tensors differ from the master, and by how much: the test above would not see factors that cancel."""
    run = save_random(tmp_path, use_mup=True)
    export_hf(run.path, tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        factors = {name: file.get_tensor(name) / run.engine.optimizer.view(name)[0] for name in file.keys()}  # noqa: SIM118
    changed = {name: float(value.flatten()[0]) for name, value in factors.items() if not (value == 1).all()}
    assert changed == {
        "model.layers.0.self_attn.q_proj.weight": 0.25,
        "model.layers.1.self_attn.q_proj.weight": 0.25,
        "model.norm.weight": BASE_FAN_IN / 32,
    }


def test_a_manifest_without_factors_is_exported_as_it_stands():
    for name in ("model.layers.3.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
        assert folded_factor(name, {"head_dim": 12}) == 1.0
    standard = model_record(make_config(tied=True, dtype="float32", head_dim=12))
    assert folded_factor("model.layers.3.self_attn.q_proj.weight", standard) == 1.0 and folding_note(standard) is None


def as_bfloat16(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(cast(values, "BF16").view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("exponent", [-39, 0, 37])
def test_the_bfloat16_cast_is_torchs(exponent):
    special = np.asarray([np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1.0039062, 1.0117188], "f4")
    drawn = (np.random.default_rng(0).normal(size=5000) * 10.0**exponent).astype("f4")
    values = np.concatenate([drawn, special])
    ours, right = as_bfloat16(values), torch.from_numpy(values).to(torch.bfloat16)
    assert torch.equal(ours.nan_to_num(7.0), right.nan_to_num(7.0)) and torch.equal(ours.isnan(), right.isnan())


def test_the_bfloat16_cast_keeps_every_nan_a_nan():
    bits = np.asarray([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], "u4")
    assert as_bfloat16(bits.view("f4")).isnan().all()


def test_names_go_both_ways():
    for model_type, table in TABLES.items():
        for canonical, hf in table:
            name, other = canonical.format(layer=12), hf.format(layer=12)
            assert (to_hf(name, model_type), from_hf(other, model_type)) == (other, name)
        for unknown in ("model.layers.x.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.scale", "rotary.inv_freq"):
            with pytest.raises(KeyError):
                from_hf(unknown, model_type)
    for foreign in (
        ("mlp.up_proj.bias", "qwen3"),
        ("self_attn.o_proj.bias", "qwen2"),
        ("self_attn.q_norm.weight", "llama"),
    ):
        with pytest.raises(KeyError):
            to_hf(f"model.layers.0.{foreign[0]}", foreign[1])


def test_shards_hold_consecutive_tensors_and_stay_within_the_limit():
    assert plan_shards([5, 5, 5], 10) == (range(0, 2), range(2, 3))
    assert plan_shards([50, 1], 10) == (range(0, 1), range(1, 2))
    assert plan_shards([1, 2, 3], 100) == (range(0, 3),)


def test_without_a_tokenizer_it_says_so(tmp_path):
    run = save_random(tmp_path)
    done = export_hf(run.path, tmp_path / "hf")
    assert done.tokenizer is None and "names no tokenizer" in done.notes[0]
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_a_tokenizer_that_changed_since_is_refused(tokenizer_dir, tmp_path):
    run = save_random(tmp_path, tokenizer=str(tokenizer_dir))
    other = tmp_path / "other"
    save_tokenizer(train_bpe(iter(TEXT), vocab_size=290), other)
    with pytest.raises(ConvertError, match="not the tokenizer the run was trained with"):
        export_hf(run.path, tmp_path / "hf", tokenizer=other)
    assert not (tmp_path / "hf").exists()


def test_nothing_is_overwritten_and_a_damaged_checkpoint_exports_nothing(tmp_path, capsys):
    run = save_random(tmp_path)
    words = [
        "convert",
        "--checkpoint-path",
        str(run.path),
        "--save-path",
        str(tmp_path / "hf"),
        "--target-format",
        "hf",
    ]
    assert main(words) == 0
    assert "step 1" in capsys.readouterr().out
    digest = hashlib.sha256((tmp_path / "hf" / "model.safetensors").read_bytes()).hexdigest()
    assert main(words) == 1
    assert "overwrites nothing" in capsys.readouterr().err
    assert hashlib.sha256((tmp_path / "hf" / "model.safetensors").read_bytes()).hexdigest() == digest
    flip_byte(run.path / "rank-00000.safetensors", -5 % (run.path / "rank-00000.safetensors").stat().st_size)
    with pytest.raises(CheckpointInvalid, match="rank-00000"):
        export_hf(run.path, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([run.path.name, "hf"])


MEASURE = """
import resource, sys
from pathlib import Path
from trainer.convert.export_hf import export_hf
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_hf(Path(sys.argv[1]), Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_memory_is_that_of_the_largest_tensor(tmp_path):
    name = CheckpointName(1, (1, 1, 1))
    final, partial = tmp_path / str(name), tmp_path / partial_name(name)
    mesh = Topology(dp=2)
    specs = [
        make_spec(1, Placement.loop(1), f"model.layers.{i}.mlp.up_proj.weight", (2048, 2048), 0, (0,))
        for i in range(12)
    ]
    total, largest = 4 * sum(spec.numel for spec in specs), 4 * 2048 * 2048
    begin(final, partial)
    shards = [empty_rank(specs, mesh, rank, zero_stage=1) for rank in range(2)]
    files = [asdict(write_rank(partial, rank_shards)) for rank_shards in shards]
    model = {**make_config(tied=True, dtype="bfloat16").model.model_config_.model_dump(), "dtype": "bfloat16"}
    commit(partial, final, shards[0], replace(facts(name), model_config=model), files)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(final), str(tmp_path / "hf")], capture_output=True, text=True, check=True
    )
    assert total == 12 * largest and (tmp_path / "hf" / "model.safetensors").stat().st_size > total / 2
    assert int(done.stdout) < 2 * largest + 64_000_000
