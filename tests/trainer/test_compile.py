"""Compiled layers: one graph for all that are alike, the same queue of weight gradients, no trace of the warm-up.

Most tests stop before code is made for the machine (`aot_eager`): graphs, order and side effects are decided by then.
That the memory of notes is left alone only code that was made can show; the numbers are the oracle's (axis `compile`).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_world import solo_engine, tiny_batch, tiny_config
from record_factory import line
from torch._dynamo.testing import CompileCounterWithBackend

import trainer.engine
from trainer import toolchain
from trainer.comm import Group, group_of, solo
from trainer.config.model import Config
from trainer.engine import Engine
from trainer.errors import ConfigError
from trainer.journal import Journal
from trainer.layers.deferred import WeightGradient, deferred_linear, take_noted
from trainer.layers.factory import LayerFactory
from trainer.mesh.topology import Topology
from trainer.models.llama import Llama
from trainer.pipeline.blocks import zero_fields
from trainer.pipeline.compile import BlockCompiler, inputs_with_gradients
from trainer.pipeline.graph import FieldRef, Graph, Meta, Node, ValueRef
from trainer.pipeline.recompute import recomputed


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    torch._dynamo.reset()
    take_noted()
    yield
    assert take_noted() == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Engines compile as far as the kernels; graphs are counted."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(trainer.engine, "BlockCompiler", partial(BlockCompiler, backend=counter))
    return counter


def compiled_config(**options: Any) -> Config:
    config = tiny_config(**options)
    return config.model_copy(update={"model": replace(config.model, compile="block")})


def steps(engine: Engine, number: int = 2) -> list[tuple[float, float]]:
    results = [engine.train_step(tiny_batch(i), lr=1e-2, weight_decay=0.1, adam_t=i + 1) for i in range(number)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize(
    "options",
    [
        {"model_type": "qwen3", "dtype": "bfloat16"},
        # What is made again is made by the same graph.
        {
            "recompute": "full",
            "recompute_interval": 2,
            "document_masks": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"recompute": "selective", "pp_engine": "zb-h1"},
        {"model_type": "starcoder2", "recompute": "selective"},
        # Two kinds of layers are two graphs.
        {"model_type": "smollm3", "no_rope_layer_interval": 2, "hidden_act": "relu2"},
    ],
    ids=str,
)
def test_layers_share_one_graph_for_training_and_one_for_validation(
    counted: CompileCounterWithBackend, options: dict[str, Any]
) -> None:
    engine = solo_engine(compiled_config(layers=3, **options))
    assert counted.frame_count == 0
    seconds = engine.compile_blocks(evaluates=True)
    graphs = 2 * len({*engine.config.model.model_config_.rope_layers})
    assert seconds is not None and seconds > 0 and counted.frame_count == graphs
    compiled = [*steps(engine), engine.eval_loss(tiny_batch(9))]
    assert counted.frame_count == graphs, "steps only run what is compiled"
    eager = solo_engine(tiny_config(layers=3, **options))
    assert eager.compile_blocks(evaluates=True) is None
    bar = 1e-2 if options.get("dtype") == "bfloat16" else 1e-5
    torch.testing.assert_close(compiled, [*steps(eager), eager.eval_loss(tiny_batch(9))], rtol=bar, atol=0.0)


def test_without_a_warm_up_the_first_step_compiles(counted: CompileCounterWithBackend) -> None:
    early, late = (solo_engine(compiled_config(layers=1)) for _ in range(2))
    early.compile_blocks(evaluates=False)
    assert steps(early) == steps(late)
    for mine, other in zip(early.optimizer.storages, late.optimizer.storages, strict=True):
        assert torch.equal(mine.master, other.master)


def test_the_warm_up_leaves_no_trace(counted: CompileCounterWithBackend) -> None:
    engine = solo_engine(compiled_config(layers=1, dtype="bfloat16"))
    for storage in engine.optimizer.storages:
        storage.grads.normal_()
    parameters = [parameter for _, parameter, _ in engine._parameters]
    grads = [parameter.grad for parameter in parameters]
    before = [(s.weights.clone(), s.grads.clone(), s.master.clone()) for s in engine.optimizer.storages]
    state = torch.get_rng_state()
    engine.compile_blocks(evaluates=True)
    assert counted.frame_count == 2 and take_noted() == [] and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True))
    for storage, known in zip(engine.optimizer.storages, before, strict=True):
        assert all(map(torch.equal, (storage.weights, storage.grads, storage.master), known))


def notes_of_three(engine: Engine) -> list[WeightGradient]:
    """All that a layer notes for three micro-batches that are in flight together."""
    call = engine._calls["model.layers.0"]
    generator = torch.Generator().manual_seed(1)
    position_ids = zero_fields((2, 16), torch.device("cpu"))["position_ids"]
    xs = [torch.randn(2, 16, 32, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    outs = [call(hidden=x, position_ids=position_ids) for x in xs]
    notes = []
    for out in outs:
        out.backward(torch.randn(out.shape, dtype=torch.float64, generator=generator))
        notes += take_noted()
    return notes


def assert_same_queue(eager: list[WeightGradient], compiled: list[WeightGradient], of: tuple[Engine, Engine]) -> None:
    names = [{parameter.data_ptr(): name for name, parameter, _ in engine._parameters} for engine in of]
    assert [names[0][note.weight] for note in eager] == [names[1][note.weight] for note in compiled]
    assert len(eager) == 21  # seven matrices a layer
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close((a.x, a.dy), (b.x, b.dy), rtol=1e-12, atol=1e-12)


def test_the_queue_is_eagers_to_rounding_after_all_backwards_have_run() -> None:
    """Nothing is written into the memory of a note: here with code made for this machine."""
    engines = solo_engine(tiny_config(dtype="float64")), solo_engine(compiled_config(dtype="float64"))
    engines[1].compile_blocks(evaluates=False)
    eager, compiled = (notes_of_three(engine) for engine in engines)
    assert_same_queue(eager, compiled, engines)


def test_recomputation_of_a_compiled_layer_changes_no_bit() -> None:
    kept, again = (solo_engine(compiled_config(dtype="float64", recompute=mode)) for mode in ("none", "full"))
    assert steps(kept) == steps(again)
    for mine, other in zip(kept.optimizer.storages, again.optimizer.storages, strict=True):
        assert torch.equal(mine.master, other.master)


class Pretended:
    """torch.distributed for a rank that is alone in a pair: writes down what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def all_reduce(self, x: torch.Tensor, **_: Any) -> None:
        self.sent.append(("sum", x.numel()))

    def gather(self, out: torch.Tensor, shard: torch.Tensor, **_: Any) -> Any:
        self.sent.append(("gather", shard.numel()))
        out.view(2, -1).copy_(shard.expand(2, -1))
        return SimpleNamespace(wait=lambda: None)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, **_: Any) -> Any:
        self.sent.append(("scatter", x.numel()))
        out.copy_(x)
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("tp_mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_a_compiled_layer_sends_what_an_eager_one_does_in_the_same_order(
    monkeypatch: pytest.MonkeyPatch, tp_mode: str, recompute: str
) -> None:
    pretended = Pretended()
    monkeypatch.setattr("trainer.comm.dist", pretended)
    monkeypatch.setattr("trainer.comm._all_gather_flat", pretended.gather)
    config, pair = tiny_config(tp=2, dtype="float64", tp_mode=tp_mode), Group(ranks=(0, 1), rank=0, pg=None)
    layers = LayerFactory(
        tp=pair, dtype=torch.float64, linear=deferred_linear, sequence_parallel=config.sequence_parallel
    )
    layer = Llama(config, layers, Topology(tp=2)).layers[0].build()  # type: ignore[operator]
    for name, parameter in list(layer.named_parameters()):
        path, _, leaf = name.rpartition(".")
        weight = torch.randn(parameter.shape, dtype=parameter.dtype, generator=torch.Generator().manual_seed(1))
        setattr(layer.get_submodule(path), leaf, torch.nn.Parameter(weight))
    x = torch.randn(2, layers.tokens_here(16), 32, dtype=torch.float64).requires_grad_()
    inputs = {"hidden": x, "position_ids": zero_fields((2, 16), torch.device("cpu"))["position_ids"]}
    layer(**inputs)

    def course(call: Any) -> tuple[Any, ...]:
        """(output, gradient, notes, sent in forward, sent in backward)"""
        pretended.sent = []
        out = call(**inputs)
        forward, pretended.sent = pretended.sent, []
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return out.detach(), grad, take_noted(), forward, pretended.sent

    compiler = BlockCompiler(torch.device("cpu"), backend="aot_eager")
    eager, compiled = course(recomputed(layer, recompute)), course(recomputed(layer, recompute, compiler.compiled))
    torch.testing.assert_close(compiled[:2], eager[:2], rtol=1e-12, atol=1e-12)
    assert [note.weight for note in compiled[2]] == [note.weight for note in eager[2]]
    assert compiled[3] == eager[3] and len(eager[3]) == (2 if tp_mode == "ALL_REDUCE" else 4)
    # A whole forward sends all of it again; chosen inside the graph, nothing of it is.
    again = eager[3] if recompute == "full" else []
    assert compiled[4] == [*again, *course(recomputed(layer, "none"))[4]]


def test_no_note_is_dropped_or_merged() -> None:
    """Neither one whose input gradient nobody wants, nor two that look the same."""
    weight = torch.nn.Parameter(torch.randn(4, 6))
    x = torch.randn(5, 6)
    compiler = BlockCompiler(torch.device("cpu"), backend="aot_eager")
    compiler.compiled(lambda x: deferred_linear(x, weight))(x=x).sum().backward()
    assert [note.weight for note in take_noted()] == [weight.data_ptr()]
    twice = compiler.compiled(lambda x: deferred_linear(x, weight) + deferred_linear(x, weight))
    twice(x=x.requires_grad_()).sum().backward()
    assert [note.weight for note in take_noted()] == [weight.data_ptr()] * 2


def test_which_inputs_take_part_in_backward() -> None:
    """A mask does not where it is made; handed to another stage it is a leaf that collects a gradient. Ids never do."""
    floats = Meta(shape=(2,), dtype="float32", is_floating=True)
    ids = Meta(shape=(2,), dtype="int64", is_floating=False)
    calls: list[tuple[str, int, tuple[FieldRef | ValueRef, ...], Meta]] = [
        ("embed", 0, (FieldRef("ids"),), floats), ("mask", 0, (FieldRef("ids"),), floats),
        ("count", 0, (FieldRef("ids"),), ids), ("first", 0, (ValueRef(0, 0), ValueRef(1, 0)), floats),
        ("scale", 0, (ValueRef(3, 0), ValueRef(2, 0)), floats), ("second", 1, (ValueRef(4, 0), ValueRef(1, 0)), floats),
        ("third", 1, (ValueRef(5, 0), ValueRef(2, 0)), floats),
    ]  # fmt: skip
    nodes = tuple(
        Node(index=i, block=name, stage=stage, inputs=tuple(zip("ab", refs, strict=False)), outputs=(meta,))
        for i, (name, stage, refs, meta) in enumerate(calls)
    )
    found = inputs_with_gradients(Graph(nodes=nodes, loss=ValueRef(6, 0)), {"embed", "first", "second", "third"})
    assert found == {(3, "a"), (4, "a"), (5, "a"), (5, "b"), (6, "a")}


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-g++")
    assert toolchain.cpp_compiler() is None
    with pytest.raises(ConfigError, match=r"model.compile: block .* no-such-g\+\+ .*apt-get install -y g\+\+"):
        solo_engine(compiled_config())


def test_only_the_first_line_of_a_launch_tells_what_compiling_took(tmp_path: Path) -> None:
    with Journal(tmp_path, print_interval=9, compile_s=2.5) as journal:
        for step in (1, 2):
            journal.step(line(step=step), train_steps=9)
    lines = [json.loads(text) for text in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [(each["step"], each["compile_s"]) for each in lines] == [(1, 2.5), (2, None)]


def test_numbers_of_groups_are_counted() -> None:
    """Operators call a group by number; one that is gone is not called."""
    first, second = solo(), solo()
    assert second.number == first.number + 1 and group_of(first.number) is first
    gone = second.number
    del second
    with pytest.raises(KeyError):
        group_of(gone)
