"""The memory estimate against arithmetic, and against what the engine really holds and saves for backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import tiny_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.comm import Group
from trainer.config import Config, load
from trainer.engine import Engine
from trainer.flops import find_gpu
from trainer.layers.deferred import take_noted
from trainer.layers.factory import LayerFactory
from trainer.layers.rotary import Rotary
from trainer.layers.vocab import CHUNK_NUMEL_ACCELERATOR
from trainer.memory import LOGITS_CHUNK_NUMEL, RankMemory, largest_micro_batch, rank_memory, usable_bytes
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.models.llama import DecoderLayer
from trainer.pipeline.generators import make_schedule

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = "model.model_config."


def config(name: str, *overrides: str) -> Config:
    loaded = load(CONFIGS / f"{name}.yaml", overrides=overrides)
    assert loaded.config is not None, loaded.problems
    return loaded.config


@pytest.mark.parametrize(
    ("dtype", "zero", "dp", "per_parameter"),
    [
        # bytes per parameter of (weights, gradients, optimizer); the seed text's 16 / dp is wrong
        ("bfloat16", 0, 8, (2, 4, 12)),
        ("bfloat16", 1, 8, (2, 4, 1.5)),
        ("float32", 1, 2, (4, 4, 4)),
        ("float64", 0, 4, (8, 8, 16)),
    ],
)
def test_bytes_per_parameter(dtype: str, zero: int, dp: int, per_parameter: tuple[float, ...]) -> None:
    overrides = (f"model.dtype={dtype}", f"optimizer.zero_stage={zero}", f"parallelism.dp={dp}")
    memory = rank_memory(config("tiny", *overrides))
    num_params = 164_416
    weights, gradients, states = (bytes_ * num_params for bytes_ in per_parameter)
    tied = 256 * 64 * per_parameter[1]  # pp = 1: the second use of the embedding has a gradient buffer of its own
    expected = (weights, gradients + tied, states)
    assert (memory.parameters, memory.gradients, memory.optimizer) == expected


def test_seven_billion_on_eight_is_52_gigabytes_not_14() -> None:
    shape = {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": "false",
    }  # fmt: skip
    overrides = [f"model.model_config.{key}={value}" for key, value in shape.items()]
    big = config("tiny", *overrides, "model.dtype=bfloat16", "parallelism.dp=8", "optimizer.zero_stage=1")
    memory = rank_memory(big)
    states = memory.parameters + memory.gradients + memory.optimizer
    assert states / 1e9 == pytest.approx(7.5 * 6.738, rel=0.01)


def engine_of(config: Config) -> Engine:
    return Engine(config, ParallelContext(Topology()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_parameters_gradients_and_states_are_what_the_engine_holds(dtype: str) -> None:
    small = config("tiny", f"model.dtype={dtype}")
    engine, memory = engine_of(small), rank_memory(small)
    states = sum(tensor.nbytes for tensor in engine.state_shards().values())
    own_master = 0 if dtype == "bfloat16" else memory.parameters
    padding = 1.02  # slots start on multiples of 64 elements
    assert memory.optimizer + own_master <= states <= padding * (memory.optimizer + own_master)
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine.model.parameters()}
    gradients = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for p in engine.model.parameters()
        if p.grad is not None
    }
    assert memory.parameters <= sum(weights.values()) <= padding * memory.parameters
    assert memory.gradients <= sum(gradients.values()) <= padding * memory.gradients


def saved_on_meta(tp_mode: str) -> int:
    """Bytes that backward keeps of one layer of a rank of tp = 2, from shapes alone."""
    small = tiny_config(tp=2, tp_mode=tp_mode)
    pair, length = Group(ranks=(0, 1), rank=0, pg=None), small.tokens.sequence_length
    layers = LayerFactory(tp=pair, dtype=torch.float32, sequence_parallel=small.sequence_parallel)
    rotary = Rotary(head_dim=8, theta=1e4, max_positions=length, dtype=torch.float32)
    hidden = torch.empty(2, layers.tokens_here(length), 32, device="meta", requires_grad=True)
    seen: list[torch.UntypedStorage] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.untyped_storage()), x)[1], lambda x: x):
        DecoderLayer(small, layers, rotary)(hidden, torch.empty(2, length, dtype=torch.int64, device="meta"))
    return sum({storage._cdata: storage.nbytes() for storage in seen}.values())


def test_sequence_parallel_keeps_what_lies_between_the_regions_once_over_tp() -> None:
    """The meta device's norm keeps its normalised input and 1/rms too, which the GPU's fused one does not."""
    whole, cut = (rank_memory(tiny_config(tp=2, tp_mode=m)).activations for m in ("ALL_REDUCE", "REDUCE_SCATTER"))
    tokens, hidden, size = 2 * 16, 32, 4
    per_layer = 2 * tokens * hidden * size // 2
    in_flight_input = tokens * hidden * size // 2
    assert whole - cut == 2 * per_layer + in_flight_input
    statistics = 2 * tokens * size // 2
    assert saved_on_meta("ALL_REDUCE") - saved_on_meta("REDUCE_SCATTER") == per_layer + per_layer + statistics


def saved_bytes(layer: DecoderLayer, hidden: torch.Tensor, positions: torch.Tensor) -> int:
    """Bytes that backward keeps of one forward, parameters apart; each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    seen: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)  # or its address could be given to another tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden, positions)
    return sum(seen.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("hidden_size", "ffn", "kv"), [(128, 384, 2), (64, 512, 4), (256, 256, 1)])
def test_activations_of_a_layer_are_what_autograd_saves(hidden_size: int, ffn: int, kv: int, kind: str) -> None:
    """On a CPU each norm also keeps its normalised input (the GPU's fused one does not), and rotary its tables."""
    one, two = (
        config(
            "tiny",
            *(f"model.model_config.hidden_size={hidden_size}", f"model.model_config.intermediate_size={ffn}"),
            *(f"model.model_config.num_key_value_heads={kv}", f"model.model_config.num_hidden_layers={layers}"),
            f"model.model_config.model_type={kind}",
        )
        for layers in (1, 2)
    )
    estimate = rank_memory(two).activations - rank_memory(one).activations
    engine = engine_of(two)
    batch, length = two.tokens.micro_batch_size, two.tokens.sequence_length
    hidden = torch.randn(batch, length, hidden_size, requires_grad=True)
    positions = torch.arange(length).expand(batch, length)
    layer = next(module for module in engine.model.modules() if isinstance(module, DecoderLayer))
    measured = saved_bytes(layer, hidden, positions)
    normalised = 2 * hidden.nbytes
    head_dim, heads = two.model.model_config.head_dim, two.model.model_config.num_attention_heads
    statistics = 4 * batch * length * (2 + heads + head_dim)  # 1/rms twice, log-sum-exp, cos and sin
    if kind == "qwen3":
        normalised += (heads + kv) * head_dim * 4 * batch * length
        statistics += (heads + kv) * 4 * batch * length
    assert measured == estimate + normalised + statistics


class _Alive(TorchDispatchMode):
    """Storages made inside, by address; those that still live are what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def kept(self, *, apart_from: set[int]) -> int:
        return sum(size for at, (ref, size) in self.made.items() if not ref.expired() and at not in apart_from)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_recomputed_layer_keeps_what_the_estimate_says(mode: str, dtype: str) -> None:
    one, two = (
        config("tiny", f"model.dtype={dtype}", f"model.recompute={mode}", f"{SHAPE}num_hidden_layers={layers}")
        for layers in (1, 2)
    )
    engine = engine_of(two)
    batch, length, hidden_size = two.tokens.micro_batch_size, two.tokens.sequence_length, 64
    hidden = torch.randn(batch, length, hidden_size, dtype=getattr(torch, dtype), requires_grad=True)
    call, positions = engine._calls["model.layers.1"], torch.arange(length).expand(batch, length)
    weights = {tensor.untyped_storage().data_ptr() for tensor in engine.model.parameters()}
    call(hidden=hidden, position_ids=positions)  # makes rotary's tables
    with _Alive() as alive:
        out = call(hidden=hidden, position_ids=positions)
    # The layer's input was made outside, and its output is the next layer's input: one stands for the other.
    assert out.shape == hidden.shape
    assert alive.kept(apart_from=weights) == rank_memory(two).activations - rank_memory(one).activations


def test_the_estimate_of_recomputation_by_hand() -> None:
    """6 layers on one rank: what every second one keeps, and one layer whole while it is made again."""
    tokens, hidden, ffn, attention = 2 * 32, 64, 128, 2 * (4 + 2) * 16
    layer = 4 * hidden + attention + 4 * ffn
    kept = {"full": hidden, "selective": 3 * hidden + (4 + 2 * 2) * 16 + 2 * ffn}
    for mode, numel in kept.items():
        every = ("model.recompute_interval=2", f"model.recompute={mode}")
        memory = rank_memory(config("tiny", f"{SHAPE}num_hidden_layers=6", *every))
        held = 3 * layer + 3 * numel + hidden + 2 * hidden + 3 * ffn + (layer - numel)
        assert memory.activations == 4 * tokens * held
    last = ("parallelism.pp=2", "tokens.batch_accumulation_per_replica=1", f"{SHAPE}num_hidden_layers=2")
    only_first = rank_memory(config("tiny", *last, "model.recompute=full", "model.recompute_interval=2"))
    assert only_first.activations == rank_memory(config("tiny", *last)).activations, "rank 1 recomputes nothing"


def test_activations_in_flight_are_the_schedules_own() -> None:
    """8 layers on 4 ranks, 8 micro-batches: what the fullest rank holds, in layers × micro-batches."""
    base = ("parallelism.pp=4", "tokens.batch_accumulation_per_replica=8", f"{SHAPE}num_hidden_layers=8")
    tokens, hidden, ffn = 2 * 32, 64, 128
    layer = 4 * hidden + 2 * (4 + 2) * 16 + 4 * ffn
    fewer = layer - ffn  # from I to W
    held = {
        "afab": 8 * (2 * layer + hidden),
        "1f1b": 4 * (2 * layer + hidden),
        "interleaved": 11 * (1 * layer + hidden),  # (v − 1)p + 2(p − 1) + 1 stages
        "zb-h1": max(4 * (2 * layer + hidden), 2 * layer + hidden + 3 * 2 * fewer),
    }
    for name, numel in held.items():
        memory = rank_memory(config("tiny", *base, f"parallelism.pp_engine={name}"))
        assert memory.activations == 4 * tokens * (numel + 2 * hidden + 3 * ffn), name


def test_a_tied_embedding_whose_sites_share_a_rank_has_a_second_gradient_buffer_there() -> None:
    """V-shaped, the first and the last stage are rank 0's: its gradients are its parameters' and once the embedding."""
    base = (f"{SHAPE}vocab_size=5000", f"{SHAPE}num_hidden_layers=4", "parallelism.pp=2", "model.dtype=float32")
    turned, looped = (
        rank_memory(config("tiny", *base, f"parallelism.pp_engine={name}")) for name in ("zb-v", "interleaved")
    )
    assert turned.gradients == turned.parameters + 4 * 5000 * 64
    assert looped.gradients == looped.parameters


def test_more_micro_batches_than_fill_the_pipeline_are_not_played() -> None:
    """The estimate of a million micro-batches is that of a few, at once; afab alone holds them all."""
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v"):
        base = ("parallelism.pp=2", f"parallelism.pp_engine={name}")
        few, many = (
            rank_memory(config("tiny", *base, f"tokens.batch_accumulation_per_replica={m}")) for m in (16, 10**6)
        )
        assert few == many


def test_a_schedule_file_counts_as_all_forwards_first_unless_it_is_given() -> None:
    base = ("parallelism.pp=2", "tokens.batch_accumulation_per_replica=6")
    own = config("tiny", *base, "parallelism.pp_engine=./mine.txt")
    assert rank_memory(own) == rank_memory(config("tiny", *base, "parallelism.pp_engine=afab"))
    given = make_schedule("1f1b", p=2, m=6)
    assert rank_memory(own, schedule=given) == rank_memory(config("tiny", *base))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_waits_for_w_is_what_the_estimate_says(dtype: str) -> None:
    """Distinct bytes of the factors of a layer's weight gradients: 3 F and all the rest, not 4 F."""
    small = config("tiny", f"model.dtype={dtype}")
    model, tokens = small.model.model_config, small.tokens.micro_batch_size * small.tokens.sequence_length
    layer = next(m for m in engine_of(small).model.modules() if isinstance(m, DecoderLayer))
    hidden = torch.randn(2, small.tokens.sequence_length, model.hidden_size, dtype=getattr(torch, dtype))
    positions = torch.arange(small.tokens.sequence_length).expand(2, -1)
    take_noted()
    layer(hidden.requires_grad_(), positions).sum().backward()
    factors = [factor for note in take_noted() for factor in (note.x, note.dy)]
    sizes = {f.untyped_storage().data_ptr(): f.numel() * f.element_size() for f in factors}
    head = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    numel = 4 * model.hidden_size + head + 3 * model.intermediate_size
    assert len(factors) == 14 and sum(sizes.values()) == tokens * numel * hidden.element_size()


def test_the_fullest_stage_is_reported() -> None:
    """With a large untied vocabulary the last stage's logits decide, with many layers the first stage's activations."""
    wide = config("tiny", "parallelism.pp=2", "model.model_config.vocab_size=100000")
    assert rank_memory(wide).logits > 0
    assert rank_memory(config("seed-1.7b")).logits == 0


def test_the_logits_chunk_is_the_one_of_the_loss() -> None:
    assert LOGITS_CHUNK_NUMEL == CHUNK_NUMEL_ACCELERATOR


@pytest.mark.parametrize("gpu", ["h100", "a100", "rtx 4090"])
def test_the_largest_micro_batch_fits_and_the_next_does_not(gpu: str) -> None:
    found = find_gpu(gpu)
    assert found is not None
    room, model = usable_bytes(found), config("smollm-135m")
    best = largest_micro_batch(model, room)
    assert best is not None
    assert rank_memory(model, micro_batch_size=best).total <= room < rank_memory(model, micro_batch_size=best + 1).total


def test_no_micro_batch_fits_where_the_states_alone_do_not() -> None:
    assert largest_micro_batch(config("smollm-135m"), 10**9) is None


def test_the_record_adds_up() -> None:
    memory = RankMemory(parameters=1, gradients=2, optimizer=3, activations=4, logits=5)
    assert memory.as_dict() == {
        "parameters": 1, "gradients": 2, "optimizer": 3, "activations": 4, "logits": 5, "total": 15,
    }  # fmt: skip
