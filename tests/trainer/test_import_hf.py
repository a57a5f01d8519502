"""A Hugging Face folder becomes a checkpoint and comes back bit for bit, and is the same model in between."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_world
import pytest
import torch
from engine_world import logits_of
from hf_world import KINDS, LENGTH, edit_config, logits_of_hf, make_folder, make_model, some_ids
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainer.checkpoint.reader import BoxReader, open_checkpoint
from trainer.checkpoint.saver import save_checkpoint
from trainer.checkpoint.state import RunState
from trainer.checkpoint.tensorfile import TensorFile, write_tensors
from trainer.checkpoint.verify import problems
from trainer.checkpoint.weights import load_weights
from trainer.cli import main
from trainer.config.architecture import ModelConfig
from trainer.config.load import load
from trainer.config.model import Config
from trainer.convert.export_hf import export_hf
from trainer.convert.hf_model import DEFAULTS, ConvertError, read_hf_config
from trainer.convert.import_hf import config_of, import_hf
from trainer.data.batch import StepBatch
from trainer.engine import Engine
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.models.families import FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def raw(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder's files as it lies there."""
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    entries = ((file, key, entry) for file in files for key, entry in file.entries.items())
    return {key: (entry.dtype, entry.shape, file.array(key).tobytes()) for file, key, entry in entries}


def json_of(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return record


def test_every_family_is_here() -> None:
    assert {kind.split()[0] for kind in KINDS} == set(FAMILIES) == set(DEFAULTS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_every_tensor_is_the_same_bytes_and_every_key_the_same_value(
    dtype: str, kind: str, tmp_path: Path
) -> None:
    """C1, C7, H3, H4."""
    folder = make_folder(tmp_path / "hf", kind, dtype=DTYPES[dtype])
    import_hf(folder, tmp_path / "ckpt")
    assert problems(tmp_path / "ckpt") == ()
    export_hf(tmp_path / "ckpt", tmp_path / "back")
    assert raw(tmp_path / "back") == raw(folder)
    before, after = json_of(folder), json_of(tmp_path / "back")
    assert {key: after.get(key, "missing") for key in before} == before
    assert after["head_dim"] * after["num_attention_heads"] >= after["hidden_size"]
    theirs, ours = (AutoConfig.from_pretrained(path).to_dict() for path in (folder, tmp_path / "back"))
    assert {key: ours.get(key) for key in theirs if not key.startswith("_")} == {
        key: value for key, value in theirs.items() if not key.startswith("_")
    }
    generation = "generation_config.json"
    assert (tmp_path / "back" / generation).read_bytes() == (folder / generation).read_bytes()


def engine_of(config: Config) -> Engine:
    return Engine(config, ParallelContext(Topology(), device=torch.device("cpu")), bucket_numel=4096)


def runnable(path: Path, dtype: str = "float32") -> Config:
    """The config a user makes with the pasted sections of a checkpoint's config.yaml."""
    text = (path / "config.yaml").read_text() + (
        "general: {project: test, run: start, seed: 3}\nparallelism: {dp: 1, pp: 1, tp: 1}\n"
        "optimizer: {learning_rate_scheduler: {learning_rate: 1e-3}}\n"
        f"tokens: {{sequence_length: {LENGTH}, train_steps: 1, micro_batch_size: 2, "
        "batch_accumulation_per_replica: 1}\ndata: {dataset: {dataset_folder: [unused]}}\n"
    )
    file = path.with_suffix(".yaml")
    file.write_text(text)
    loaded = load(file, overrides=[f"model.dtype={dtype}"])
    assert loaded.config is not None, loaded.problems
    return loaded.config


def batch() -> StepBatch:
    ids = some_ids().unsqueeze(0)
    return StepBatch(
        input_ids_MBT=ids, labels_MBT=(ids + 1) % hf_world.VOCAB,
        position_ids_MBT=torch.arange(LENGTH).expand(ids.shape).contiguous(), sample_ids=(0, 1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_in_between_and_after_training_it_has_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    """C1, C8, H1: three times the original length where positions are scaled. In, and trained for a step out again."""
    model = make_model(kind)
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    config = runnable(tmp_path / "ckpt")
    engine = engine_of(config)
    assert load_weights(Path(str(config.model.init_method.path)), engine) == ()
    theirs = logits_of_hf(model)
    assert float(theirs.std()) > 0.1
    assert float((logits_of(engine, batch())[0] - theirs).abs().max()) <= 1e-5
    engine.train_step(batch(), lr=0.01, weight_decay=0.0, adam_t=1)
    state = RunState(step=1, consumed_samples=2, consumed_tokens=48, adam_t=1)
    saved = save_checkpoint(
        engine, state, checkpoints_dir=tmp_path, epoch="a0001g01c0001", run="x", config_text="", tokenizer=None
    )
    export_hf(tmp_path / saved.name, tmp_path / "out")
    trained, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    changed = logits_of_hf(trained)
    assert float((logits_of(engine, batch())[0] - changed).abs().max()) <= 1e-5
    assert float((changed - theirs).abs().max()) > 1e-3, "it was trained in between"


SHARED = (
    "num_key_value_heads", "max_position_embeddings", "hidden_act", "initializer_range", "tie_word_embeddings",
    "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def test_what_a_missing_key_means_is_what_transformers_takes() -> None:
    """Every key that has an effect: the family's own default in transformers, or pawl's where that is the same."""
    needed = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 32}
    for kind, family in FAMILIES.items():
        record = {"model_type": kind, **needed, "vocab_size": 200000}
        if kind == "mistral":  # whose own default, a window, is refused
            with pytest.raises(ConvertError, match="sliding_window"):
                read_hf_config(record, where="config.json")
            record["sliding_window"] = None
        model = read_hf_config(record, where="config.json").model
        theirs = CONFIG_MAPPING[kind](**{key: value for key, value in record.items() if key != "model_type"})
        for key in (*SHARED, *(family.keys - {"layer_types", "no_rope_layers", "max_window_layers"})):
            assert getattr(model, key) == getattr(theirs, key), (kind, key)
        assert model.rope_theta == theirs.rope_parameters["rope_theta"], kind
        assert model.head_size == (getattr(theirs, "head_dim", None) or 2), kind
        if kind == "smollm3":
            assert [int(x) for x in model.rope_layers] == theirs.no_rope_layers


@pytest.mark.parametrize("theta", [1000000, 1e6], ids=["int", "float"])
@pytest.mark.parametrize("form", ["rope_theta", "rope_parameters", "rope_scaling"])
def test_rope_theta_is_kept_in_every_spelling(form: str, theta: float, tmp_path: Path) -> None:
    """C7 (litgpt#2217)."""
    folder = make_folder(tmp_path / "hf", "qwen2")
    spelled: dict[str, Any] = {
        "rope_theta": {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": None},
        "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
        "rope_scaling": {"rope_parameters": ..., "rope_theta": theta,
                         "rope_scaling": {"type": "linear", "factor": 2.0}},
    }[form]  # fmt: skip
    edit_config(folder, **spelled)
    import_hf(folder, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    said, loaded = json_of(tmp_path / "out"), AutoConfig.from_pretrained(tmp_path / "out")
    assert said["rope_theta"] == said["rope_parameters"]["rope_theta"] == theta
    assert loaded.rope_parameters["rope_theta"] == theta
    if form == "rope_scaling":
        assert said["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
        assert (loaded.rope_parameters["rope_type"], loaded.rope_parameters["factor"]) == ("linear", 2.0)


def test_head_dim_is_always_written(tmp_path: Path) -> None:
    """C2 (Fast-LLM#102): the shapes of Qwen3-0.6B, and a hidden size that is no multiple of the heads."""
    for hidden, heads in ((1024, 16), (1792, 24)):
        record = {
            "model_type": "qwen3", "hidden_size": hidden, "num_attention_heads": heads, "head_dim": 128,
            "num_key_value_heads": 8, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 60,
        }  # fmt: skip
        model = read_hf_config(record, where="config.json").model
        assert (model.head_size, model.num_attention_heads * model.head_size) == (128, 128 * heads)
    folder = make_folder(tmp_path / "hf", "qwen3", hidden_size=28, num_attention_heads=3, num_key_value_heads=3)
    import_hf(folder, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    assert json_of(tmp_path / "out")["head_dim"] == 12
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and loaded.model.layers[0].self_attn.q_proj.weight.shape == (36, 28)


def test_keys_that_mean_nothing_here_are_named_and_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C11 (nanotron#307): they survive the import, a config that is pasted, and the export of a trained run."""
    extra = {"internal_version": "7b ü", "nested": {"a": [1, None, 2.5]}, "eos_token_id": [2, 5, 9]}
    folder = edit_config(make_folder(tmp_path / "hf", "llama"), **extra)
    assert main(["convert", "--checkpoint-path", str(folder), "--save-path", str(tmp_path / "ckpt"),
                 "--target-format", "pawl"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert "internal_version" in said and "nested" in said
    manifest = open_checkpoint(tmp_path / "ckpt").manifest
    assert manifest.model_config["source"]["transformers_version"] == json_of(folder)["transformers_version"]
    assert (manifest.run, manifest.step, manifest.pawl_version) == ("imported", 0, manifest.pawl_version)
    engine = engine_of(runnable(tmp_path / "ckpt"))
    load_weights(tmp_path / "ckpt", engine)
    saved = save_checkpoint(
        engine, RunState(step=1, adam_t=1), checkpoints_dir=tmp_path, epoch="a0001g01c0001", run="x", config_text="",
        tokenizer=None,
    )  # fmt: skip
    for name, source in (("again", "ckpt"), ("trained", saved.name)):
        export_hf(tmp_path / source, tmp_path / name)
        record = json_of(tmp_path / name)
        assert {key: record[key] for key in extra} == extra
    assert json.loads((tmp_path / "trained" / "generation_config.json").read_text())["eos_token_id"] == [2, 5, 9]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "gpt2"}, r"model_type 'gpt2' is not offered; offered are llama, mistral"),
    "mixture of experts": ({"model_type": "mixtral"}, "mixture of experts"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8"),
    "window": ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096"),
    "window switched on": ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window is true"),
    "layers with a window": ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config is given"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'"),
    "old rope type": (
        {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'",
    ),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "activation": ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    "other class": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures says LlamaForSeq"),
    "dtype": ({"torch_dtype": "float8_e4m3fn", "dtype": ...}, "dtype 'float8_e4m3fn' is not offered"),
    "size is text": ({"hidden_size": "32"}, "hidden_size"),
    "size is missing": ({"hidden_size": ...}, "hidden_size: this key is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused_by_field_before_any_work(case: str, tmp_path: Path) -> None:
    """C8: nothing that changes the numbers is ever ignored."""
    changes, said = REFUSED[case]
    folder = edit_config(make_folder(tmp_path / "hf", "llama"), **changes)
    with pytest.raises(ConvertError, match=said):
        import_hf(folder, tmp_path / "ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_everything_that_stands_against_a_config_is_said_at_once() -> None:
    record = {"model_type": "llama", "attention_dropout": 0.1, "quantization_config": {}, "hidden_act": "x"}
    with pytest.raises(ConvertError) as raised:
        read_hf_config(record, where="config.json")
    for field in ("quantization_config", "hidden_act", "attention_dropout", "hidden_size", "vocab_size"):
        assert field in str(raised.value)


def rewrite(folder: Path, change: Any) -> None:
    """Write model.safetensors again, with tensors that `change` was given as a dict to edit."""
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def test_tied_heads_are_one_tensor_and_differing_ones_an_error(tmp_path: Path) -> None:
    """C5 (transformers#30202), W5: with and without the head in the file, another head, no head at all."""
    tied = make_folder(tmp_path / "tied", "qwen3")
    plain = import_hf(tied, tmp_path / "a")
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    double = import_hf(tied, tmp_path / "b")
    assert double.num_parameters == plain.num_parameters and any("one copy is kept" in note for note in double.notes)
    export_hf(tmp_path / "b", tmp_path / "out")
    assert "lm_head.weight" not in raw(tmp_path / "out")
    rewrite(tied, lambda t: t["lm_head.weight"].view(-1)[-1:].add_(1e-3))
    with pytest.raises(ConvertError, match=r"tie_word_embeddings is true, but lm_head\.weight and .* differ"):
        import_hf(tied, tmp_path / "c")
    untied = make_folder(tmp_path / "untied", "llama")
    rewrite(untied, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConvertError, match=r"missing, the first is lm_head\.weight \(tie_word_embeddings is false"):
        import_hf(untied, tmp_path / "d")


WRONG: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors are missing.*1\.mlp\.up_proj"),
    "unknown": (lambda t: t.update({"model.layers.1.mlp.scale": torch.ones(2)}), r"holds model\.layers\.1\.mlp\.scale"),
    "a layer too many": (
        lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)}), r"no place for",
    ),
    "a bias nobody has": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(48)}), r"q_proj\.bias.*no place for",
    ),
    "another shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(33)}), r"model\.norm\.weight has shape \(33,\).*\(32,\)",
    ),
    "integers": (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}), "holds I64"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_tensor_that_is_not_right_is_named(case: str, tmp_path: Path) -> None:
    change, said = WRONG[case]
    folder = make_folder(tmp_path / "hf", "llama")
    rewrite(folder, change)
    with pytest.raises(ConvertError, match=said):
        import_hf(folder, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_old_folders_with_rotary_buffers_or_without_the_prefix_are_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "qwen3")
    before = raw(folder)
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert any("computed anew" in note for note in import_hf(folder, tmp_path / "a").notes)
    rewrite(folder, lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])
    import_hf(folder, tmp_path / "b")
    export_hf(tmp_path / "b", tmp_path / "out")
    assert raw(tmp_path / "out") == before


def test_sharded_folders_are_read_by_their_index_and_compared_with_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "llama", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    done = import_hf(folder, tmp_path / "ckpt", max_shard_bytes=30_000)
    assert len(list((tmp_path / "ckpt").glob("rank-*.safetensors"))) > 1 and problems(tmp_path / "ckpt") == ()
    exported = export_hf(tmp_path / "ckpt", tmp_path / "out", max_shard_bytes=20_000)
    record = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert record["metadata"]["total_size"] == exported.num_bytes == done.num_bytes
    assert raw(tmp_path / "out") == raw(folder)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name, file = next(item for item in good["weight_map"].items() if item[0].endswith("q_proj.weight"))
    other = next(f for f in good["weight_map"].values() if f != file)
    for weight_map, said in (
        ({k: v for k, v in good["weight_map"].items() if k != name}, f"holds {name}, which .* does not name"),
        ({**good["weight_map"], "model.extra.weight": file}, "does not hold model.extra.weight"),
        ({**good["weight_map"], name: other}, f"does not hold {name}"),
        ({**good["weight_map"], name: "../x.safetensors"}, "not the plain name"),
        ({**good["weight_map"], name: "gone.safetensors"}, "gone.safetensors is missing"),
        ({}, "no table of tensor and file"),
    ):
        index.write_text(json.dumps({**good, "weight_map": weight_map}))
        with pytest.raises(ConvertError, match=said):
            import_hf(folder, tmp_path / "x")
    index.write_text(json.dumps({**good, "metadata": {"total_size": 5}}))
    assert any("says 5 bytes" in note for note in import_hf(folder, tmp_path / "y").notes)


def test_pickles_are_never_opened_and_damage_is_named(tmp_path: Path) -> None:
    """X4: a pickle with a side effect stays a file nobody reads."""
    folder = make_folder(tmp_path / "hf", "llama")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-100])
    with pytest.raises(ConvertError, match=r"model\.safetensors: tensor .* lies outside"):
        import_hf(folder, tmp_path / "ckpt")
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(ConvertError, match=r"pytorch_model\.bin is a pickle.*never is"):
        import_hf(folder, tmp_path / "ckpt")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "ckpt").exists()
    with pytest.raises(ConvertError, match="is no folder"):
        import_hf(tmp_path / "none", tmp_path / "ckpt")
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConvertError, match=r"config\.json: holds a JSON list"):
        import_hf(folder, tmp_path / "ckpt")


def test_mixed_precisions_stay_what_they_are(tmp_path: Path) -> None:
    """Norms in fp32 beside bf16 matrices; with --dtype all become one."""
    folder = make_folder(tmp_path / "hf", "llama", dtype=torch.bfloat16)
    rewrite(folder, lambda t: t.update({k: v.float() for k, v in t.items() if v.dim() == 1}))
    import_hf(folder, tmp_path / "ckpt")
    export_hf(tmp_path / "ckpt", tmp_path / "same")
    assert raw(tmp_path / "same") == raw(folder) and {d for d, _, _ in raw(folder).values()} == {"BF16", "F32"}
    export_hf(tmp_path / "ckpt", tmp_path / "wide", dtype="float32")
    wide = tmp_path / "wide" / "model.safetensors"
    with safe_open(folder / "model.safetensors", framework="pt") as before, safe_open(wide, framework="pt") as after:
        for name in before.keys():  # noqa: SIM118
            assert torch.equal(after.get_tensor(name), before.get_tensor(name).float())
    assert json_of(tmp_path / "wide")["dtype"] == "float32"


def test_a_half_precision_checkpoint_starts_a_run_exactly(tmp_path: Path) -> None:
    for dtype, torch_dtype in DTYPES.items():
        folder = make_folder(tmp_path / f"hf-{dtype}", "llama", dtype=torch_dtype)
        import_hf(folder, tmp_path / dtype)
        engine = engine_of(runnable(tmp_path / dtype))
        load_weights(tmp_path / dtype, engine)
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert torch.equal(engine.optimizer.view(name)[0], file.get_tensor(name).float())


def test_nothing_is_overwritten_and_the_reader_sees_what_was_written(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf", "starcoder2")
    import_hf(folder, tmp_path / "ckpt")
    with pytest.raises(ConvertError, match="overwrites nothing"):
        import_hf(folder, tmp_path / "ckpt")
    checkpoint = open_checkpoint(tmp_path / "ckpt")
    reader, weights = BoxReader(checkpoint), raw(folder)
    assert set(checkpoint.index.tensors) == set(weights)
    assert all(reader.tensor(name).tobytes() == data for name, (_, _, data) in weights.items())


MEASURE = """
import resource, sys
from pathlib import Path
from trainer.convert.export_hf import export_hf
from trainer.convert.import_hf import import_hf
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
import_hf(Path(sys.argv[1]), Path(sys.argv[2]))
middle = peak()
export_hf(Path(sys.argv[2]), Path(sys.argv[3]))
print((middle - before) * 1024, (peak() - before) * 1024)
"""


def test_memory_is_that_of_the_largest_tensor_both_ways(tmp_path: Path) -> None:
    import numpy as np

    from trainer.spec import param_specs

    model = ModelConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8, vocab_size=100
    )
    specs = param_specs(config_of(model), Topology())
    folder = tmp_path / "hf"
    folder.mkdir()
    record = {**model.model_dump(include={"hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"}),
              "model_type": "llama", "num_attention_heads": 8, "dtype": "bfloat16"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(record))
    entries = [(spec.name, "BF16", spec.shape) for spec in specs]
    write_tensors(folder / "model.safetensors", entries, (np.zeros(spec.shape, np.uint16) for spec in specs))
    words = [str(tmp_path / name) for name in ("hf", "ckpt", "out")]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True)
    total, largest = 2 * sum(spec.numel for spec in specs), 2 * 1024 * 4096
    assert total > 18 * largest
    for used in map(int, done.stdout.split()):
        assert used < 2 * largest + 64_000_000
