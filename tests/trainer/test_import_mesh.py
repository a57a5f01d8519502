"""An imported model on any mesh: every rank reads its own boxes of it, tied or not, whatever the vocabulary."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.checkpoint.boxes import assert_exact_cover, whole
from trainer.checkpoint.plan import held_boxes, view
from trainer.checkpoint.reader import cells, open_checkpoint
from trainer.checkpoint.shards import RankShards
from trainer.checkpoint.tensorfile import TensorFile, write_tensors
from trainer.checkpoint.weights import as_torch, fill_weights
from trainer.config.architecture import ModelConfig
from trainer.config.model import Config
from trainer.convert.export_hf import export_hf
from trainer.convert.import_hf import config_of, import_hf
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES, plan_rank_layout
from trainer.spec import param_specs

BUCKET_NUMEL, WIDTH = 1 << 16, 8
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 6},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "use_bias": True},
}


def shape(kind: str, *, tied: bool, vocab: int = 67) -> ModelConfig:
    return ModelConfig(
        model_type=kind, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocab, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        **KINDS[kind],
    )  # fmt: skip


def make_folder(folder: Path, model: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    """A Hugging Face folder in fp16 whose every element is told from its neighbours; its tensors."""
    folder.mkdir()
    kept = {key: value for key, value in model.model_dump(exclude_none=True).items() if key != "rope_parameters"}
    keys = {key: value for key, value in kept.items() if key in model.family.keys or key in SHARED}
    (folder / "config.json").write_text(json.dumps({**keys, "dtype": "float16"}))
    rng = np.random.default_rng(3)
    specs = param_specs(config_of(model), Topology())
    arrays = {spec.name: rng.normal(size=spec.shape).astype("f2") for spec in specs}
    write_tensors(folder / "model.safetensors", [(k, "F16", a.shape) for k, a in arrays.items()], arrays.values())
    return arrays


SHARED = {
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rope_theta",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "hidden_act", "tie_word_embeddings",
    "bos_token_id", "eos_token_id", "initializer_range", "attention_dropout",
}  # fmt: skip


def on_mesh(config: Config, mesh: Topology) -> Config:
    parallelism = config.parallelism.model_copy(update={"dp": mesh.dp, "pp": mesh.pp, "tp": mesh.tp})
    return config.model_copy(update={"parallelism": parallelism})


def check_mesh(checkpoint: Path, arrays: dict[str, Any], model: ModelConfig, mesh: Topology) -> None:
    """Each rank's storage against the folder's tensors; padding and moments zero; all boxes together cover all."""
    opened = open_checkpoint(checkpoint)
    specs = param_specs(on_mesh(config_of(model), mesh), mesh)
    covered: dict[str, set[Any]] = {spec.name: set() for spec in specs}
    for rank in range(mesh.world_size):
        layout = plan_rank_layout(specs, mesh, rank, bucket_numel=BUCKET_NUMEL)
        shards = RankShards(
            specs=specs, topology=mesh, layout_of=lambda _, layout=layout: layout, rank=rank, zero_stage=1,
            tensors={
                (state, bucket.index): torch.full((bucket.shard_numel,), -7.0) for bucket in layout.buckets
                for state in STATES
            },
        )  # fmt: skip
        fill_weights(opened, shards)
        for piece in held_boxes(specs, layout, mesh, rank, 1):
            stored = view(shards.tensors["master", piece.bucket].numpy(), piece)
            assert np.array_equal(stored, arrays[piece.name][cells(piece.box)]), (piece.name, rank)
            covered[piece.name].add(piece.box)
            stored[...] = 0
        assert not any(tensor.any() for tensor in shards.tensors.values()), "padding and moments are zero"
    for spec in specs:
        assert_exact_cover(whole(spec.shape), covered[spec.name])


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("starcoder2", True)])
def test_each_rank_of_any_mesh_reads_exactly_its_part(kind: str, tied: bool, tmp_path: Path) -> None:
    """C3: a vocabulary of 67, which no tp divides; R9: layers keep their number on every stage."""
    model = shape(kind, tied=tied)
    arrays = make_folder(tmp_path / "hf", model)
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    for tp, pp in product((1, 2, 4), (1, 2, 3, 4)):
        check_mesh(tmp_path / "ckpt", arrays, model, Topology(dp=2 if tp * pp == 2 else 1, pp=pp, tp=tp))


VOCABULARIES = [(50257, True), (50257, False), (151669, True), (151669, False), (100278, True)]


@pytest.mark.parametrize(("vocab", "tied"), VOCABULARIES)
def test_a_vocabulary_that_tp_does_not_divide_keeps_its_size(vocab: int, tied: bool, tmp_path: Path) -> None:
    """C3 (ColossalAI#6167): GPT-2's, Qwen3-Embedding's, OLMo 3's; padded inside, whole in the export."""
    model = shape("qwen3", tied=tied, vocab=vocab)
    arrays = make_folder(tmp_path / "hf", model)
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    for mesh in (Topology(tp=4), Topology(tp=2, pp=2)):
        check_mesh(tmp_path / "ckpt", arrays, model, mesh)
    export_hf(tmp_path / "ckpt", tmp_path / "out")
    embedding = TensorFile(tmp_path / "out" / "model.safetensors").array("model.embed_tokens.weight")
    assert embedding.shape == (vocab, WIDTH) and np.array_equal(embedding, arrays["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == vocab


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_values_of_a_file_become_torchs(dtype: str) -> None:
    values = np.asarray([0.5, -1.25, 1e-3], {"F16": "f2", "F32": "f4", "F64": "f8"}[dtype])
    assert np.array_equal(as_torch(values, dtype).numpy(), values)
    bits = as_torch(np.asarray([0x3F80, 0xC020], "u2"), "BF16")
    assert bits.dtype == torch.bfloat16 and bits.tolist() == [1.0, -2.5]
