"""The memory estimate against arithmetic, and against what the engine really holds and saves for backward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import tiny_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ops.bench.live import Allocation, Lived, lived
from ops.bench.memory import step_peak
from trainer.activations import ACCELERATOR, CPU, Kernels, stage_needs
from trainer.comm import Group
from trainer.config import Config, load
from trainer.config.rope import RopeParameters
from trainer.engine import Engine
from trainer.flops import find_gpu
from trainer.layers.deferred import take_noted
from trainer.layers.factory import LayerFactory
from trainer.layers.rotary import Rotary
from trainer.layers.vocab import CHUNK_NUMEL, CHUNK_NUMEL_ACCELERATOR
from trainer.memory import (
    UNFINISHED_REDUCTIONS,
    RankMemory,
    largest_micro_batch,
    memory_of_ranks,
    moments,
    rank_memory,
    usable_bytes,
)
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.models.llama import DecoderLayer
from trainer.optim.optimizer import MAX_UNFINISHED
from trainer.pipeline.engine.parts import WeightGradients
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.schedule import Op

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


def kept(config: Config, kernels: Kernels = ACCELERATOR) -> int:
    """Bytes of activations that a micro-batch keeps on the first stage from forward to backward."""
    return stage_needs(config, kernels=kernels, micro_batch_size=config.tokens.micro_batch_size)[0].kept.activations


def saved_on_meta(tp_mode: str) -> int:
    """Bytes that backward keeps of one layer of a rank of tp = 2, from shapes alone."""
    small = tiny_config(tp=2, tp_mode=tp_mode)
    pair, length = Group(ranks=(0, 1), rank=0, pg=None), small.tokens.sequence_length
    layers = LayerFactory(tp=pair, dtype=torch.float32, sequence_parallel=small.sequence_parallel)
    rotary = Rotary(head_dim=8, rope=RopeParameters(rope_theta=1e4), max_positions=length, dtype=torch.float32)
    hidden = torch.empty(2, layers.tokens_here(length), 32, device="meta", requires_grad=True)
    seen: list[torch.UntypedStorage] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(x.untyped_storage()), x)[1], lambda x: x):
        DecoderLayer(small, layers, rotary)(hidden, torch.empty(2, length, dtype=torch.int64, device="meta"))
    return sum({storage._cdata: storage.nbytes() for storage in seen}.values())


def test_sequence_parallel_keeps_what_lies_between_the_regions_once_over_tp() -> None:
    """The meta device's norm keeps its normalised input and 1/rms too, which the GPU's fused one does not."""
    modes = ("ALL_REDUCE", "REDUCE_SCATTER")
    whole, cut = (kept(tiny_config(tp=2, tp_mode=m)) - kept(tiny_config(tp=2, tp_mode=m, layers=1)) for m in modes)
    tokens, hidden, size = 2 * 16, 32, 4
    per_layer = 2 * tokens * hidden * size // 2
    assert whole - cut == per_layer
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


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "smollm3,no_rope_layer_interval=2", "starcoder2", "llama,hidden_act=relu2"]
)
@pytest.mark.parametrize(("hidden_size", "ffn", "kv"), [(128, 384, 2), (64, 512, 4), (256, 256, 1)])
def test_activations_of_a_layer_are_what_autograd_saves(hidden_size: int, ffn: int, kv: int, kind: str) -> None:
    one, two = (
        config(
            "tiny",
            *(f"model.model_config.hidden_size={hidden_size}", f"model.model_config.intermediate_size={ffn}"),
            *(f"model.model_config.num_key_value_heads={kv}", f"model.model_config.num_hidden_layers={layers}"),
            *(f"model.model_config.{key}" for key in f"model_type={kind}".split(",")),
        )
        for layers in (1, 2)
    )
    engine = engine_of(two)
    batch, length = two.tokens.micro_batch_size, two.tokens.sequence_length
    hidden = torch.randn(batch, length, hidden_size, requires_grad=True)
    positions = torch.arange(length).expand(batch, length)
    _, layer = (module for module in engine.model.modules() if isinstance(module, DecoderLayer))
    assert saved_bytes(layer, hidden, positions) == kept(two, CPU) - kept(one, CPU)
    normalised = 0 if kind == "starcoder2" else 2 * hidden.nbytes
    if kind == "qwen3":
        model = two.model.model_config
        normalised += (model.num_attention_heads + kv) * model.head_dim * 4 * batch * length
    assert kept(two, CPU) - kept(one, CPU) == kept(two) - kept(one) + normalised, "a GPU's RMSNorm is one operation"


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
@pytest.mark.parametrize("kind", ["llama", "starcoder2"])
def test_a_recomputed_layer_keeps_what_the_estimate_says(mode: str, dtype: str, kind: str) -> None:
    options = (f"model.dtype={dtype}", f"model.recompute={mode}", f"{SHAPE}model_type={kind}")
    one, two = (config("tiny", *options, f"{SHAPE}num_hidden_layers={layers}") for layers in (1, 2))
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
    assert alive.kept(apart_from=weights) == kept(two) - kept(one)


def test_the_estimate_of_recomputation_by_hand() -> None:
    """6 layers on one rank: what every second one keeps, and one layer whole while it is made again.

    The last norm's input has become the gradient then; the feed-forward's backward has three tensors more.
    """
    tokens, hidden, ffn, attention = 2 * 32, 64, 128, 2 * (4 + 2) * 16
    layer = 4 * (4 * hidden + attention + 4 * ffn + 16) + 4 * (2 + 4)
    held = {"full": hidden, "selective": 3 * hidden + (4 + 2 * 2) * 16 + 2 * ffn}
    for mode, numel in held.items():
        six = (f"{SHAPE}num_hidden_layers=6", f"model.recompute={mode}")
        all_six, second = (
            stage_needs(config("tiny", *six, *more), kernels=ACCELERATOR, micro_batch_size=2)[0]
            for more in ((), ("model.recompute_interval=2",))
        )
        assert all_six.kept.activations == tokens * (6 * 4 * numel + 4 * hidden)
        assert second.kept.activations == tokens * (3 * layer + 3 * 4 * numel + 4 * hidden)
        assert all_six.backward[0].activations == tokens * (layer - 4 * numel + 4 * 3 * ffn)
        assert second.backward[0].activations == tokens * 4 * 3 * ffn, "the deepest layer is not among them"
        waiting = 4 * (4 * hidden + attention + 3 * ffn) - 4 * numel  # behind I what W needs is left of each layer
        assert all_six.input[0].activations == tokens * (5 * waiting + layer - 4 * numel + 4 * 3 * ffn)


def test_activations_in_flight_are_the_schedules_own() -> None:
    """8 layers on 4 ranks, 8 micro-batches: what the fullest rank holds, in layers × micro-batches."""
    base = ("parallelism.pp=4", "tokens.batch_accumulation_per_replica=8", f"{SHAPE}num_hidden_layers=8")
    tokens, hidden, ffn = 2 * 32, 64, 128
    layer = 4 * (4 * hidden + 2 * (4 + 2) * 16 + 4 * ffn + 16) + 4 * (2 + 4)
    pending = 4 * (4 * hidden + 2 * (4 + 2) * 16 + 3 * ffn)
    held = {
        "afab": 8 * 2 * layer,
        "1f1b": 4 * 2 * layer,
        "interleaved": 11 * 1 * layer,  # (v − 1)p + 2(p − 1) + 1 stages
        "zb-h1": max(4 * 2 * layer, 2 * layer + 3 * 2 * pending),
    }
    for name, size in held.items():
        every = memory_of_ranks(config("tiny", *base, f"parallelism.pp_engine={name}"))
        most = max(memory.activations for memory in every if memory.pp_rank < 3)
        assert most == tokens * (size + 4 * (hidden + 3 * ffn)), name


def test_the_moments_of_a_list_are_few_and_say_what_waits() -> None:
    """zb-h1 on two ranks: before the third F of rank 0 one micro-batch waits for I, none for W."""
    few, many = (moments(make_schedule("zb-h1", p=2, m=m).lists[1]) for m in (8, 512))
    assert few == many and len(few) < 12
    first = min(moments(make_schedule("1f1b", p=2, m=4).lists[0]), key=lambda moment: moment.alive)
    assert (first.op, first.alive, first.pending) == (Op.F, ((0, 0),), ((0, 0),))
    assert {moment.pending for moment in few} >= {((1, 0),), ((1, 1),)}


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.recompute=full", f"{SHAPE}num_hidden_layers=8"),
        ("model.recompute=selective", "model.recompute_interval=2", f"{SHAPE}num_hidden_layers=6"),
        (f"{SHAPE}vocab_size=20000", f"{SHAPE}num_hidden_layers=1"),
        ("parallelism.pp_engine=zb-h1", f"{SHAPE}num_hidden_layers=4"),
        ("parallelism.pp_engine=afab", f"{SHAPE}model_type=qwen3"),
        (f"{SHAPE}model_type=starcoder2", f"{SHAPE}num_hidden_layers=6"),
        (f"{SHAPE}model_type=starcoder2", "model.dtype=bfloat16", "model.recompute=selective"),
        ("tokens.document_masks=true",),
        ("model.dtype=bfloat16",),
        ("model.dtype=bfloat16", "model.recompute=full", f"{SHAPE}num_hidden_layers=6"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_step_holds_at_most_what_is_predicted(overrides: tuple[str, ...]) -> None:
    """The peak of a whole step in one process, engine included, from the allocator's own events."""
    sizes = (
        *(f"{SHAPE}hidden_size=128", f"{SHAPE}intermediate_size=344", f"{SHAPE}max_position_embeddings=128"),
        "tokens.sequence_length=128",
    )
    small = config("tiny", *sizes, "tokens.batch_accumulation_per_replica=3", *overrides)
    assert step_peak(small) == pytest.approx(rank_memory(small, kernels=CPU).total, rel=0.01)


def test_of_a_recomputed_stage_one_layer_s_weight_gradients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were those of all eight layers to wait for the end of B, recomputation would save a good fifth and no more."""
    small = config("tiny", "model.recompute=full", f"{SHAPE}num_hidden_layers=8")
    (need,) = stage_needs(small, kernels=CPU, micro_batch_size=2)
    monkeypatch.setattr(WeightGradients, "_passed", lambda self, _: None)
    waiting = need.pending.activations - need.kept.activations
    assert step_peak(small) > rank_memory(small, kernels=CPU).total + waiting // 2


def test_live_bytes_are_of_what_was_seen_being_made() -> None:
    events = [
        Allocation(2.0, 700, -100), Allocation(1.0, 700, 100), Allocation(2.5, 900, -999),
        Allocation(3.0, 700, 60), Allocation(4.0, 800, 50),
    ]  # fmt: skip
    assert lived(events) == Lived(peak=110, left=110)


def test_what_is_made_where_something_lay_says_that_it_is_gone() -> None:
    """Its free was on another thread: the first two are covered, the third ends where the new one begins."""
    lay = [Allocation(1.0, 100, 20), Allocation(1.1, 125, 20), Allocation(1.2, 90, 10), Allocation(1.3, 150, 5)]
    assert lived([*lay, Allocation(2.0, 100, 50)]) == Lived(peak=65, left=65)


def test_gradients_on_a_cpu_are_summed_through_copies() -> None:
    """Few tokens: the copies, of a bucket that holds everything and one of the norms, are the fullest moment."""
    few = ("model.dtype=float32", "tokens.micro_batch_size=1", "tokens.sequence_length=16")
    two = config("tiny", *few, "parallelism.dp=2")
    copied, plain = rank_memory(two, kernels=CPU), rank_memory(two)
    padding = 1.02
    assert copied.parameters <= copied.scratch <= padding * copied.parameters
    assert copied.activations == copied.logits == plain.scratch == 0 < plain.activations
    alone = rank_memory(config("tiny", *few), kernels=CPU)
    assert alone.scratch == 0 < alone.activations


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
    assert ACCELERATOR.logits_chunk == CHUNK_NUMEL_ACCELERATOR and CPU.logits_chunk == CHUNK_NUMEL["cpu"]


def test_the_copies_under_way_are_those_of_the_optimizer() -> None:
    assert UNFINISHED_REDUCTIONS == MAX_UNFINISHED


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
    memory = RankMemory(
        pp_rank=1, stages=(1, 3), parameters=1, gradients=2, optimizer=3, activations=4, logits=5, scratch=6
    )
    assert memory.as_dict() == {
        "parameters": 1, "gradients": 2, "optimizer": 3, "activations": 4, "logits": 5, "scratch": 6, "total": 21,
        "pp_rank": 1, "stages": [1, 3],
    }  # fmt: skip
