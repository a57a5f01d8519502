"""The interpreter in one process, messages played by a stub: what it keeps alive, and for how long."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.comm import Group, solo
from trainer.layers.deferred import deferred_linear
from trainer.layers.linear import RowParallelLinear
from trainer.pipeline.block import PipelineBlock, TensorPointer
from trainer.pipeline.engine import interpreter as module
from trainer.pipeline.engine.interpreter import Interpreter
from trainer.pipeline.generators import forward_only, make_schedule
from trainer.pipeline.schedule import Placement, Schedule
from trainer.pipeline.trace import trace
from trainer.pipeline.validate import peaks, validate

P, SHAPE = 3, (7, 11)


class Watch:
    """Storages seen, and how many of them are alive."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []

    def add(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata not in {other.cdata for other in self.alive()}:
            self.seen.append(reference)

    def alive(self) -> list[StorageWeakRef]:
        self.seen = [reference for reference in self.seen if not reference.expired()]
        return self.seen


class _Layer(nn.Module):
    """[7, 11] → [7, 11], by a linear layer that keeps its input for W. Notes inputs, and the most alive after a use."""

    def __init__(self, inputs: Watch, outputs: Watch, most: list[int]) -> None:
        super().__init__()
        self.inputs, self.outputs, self.most = inputs, outputs, most
        self.linear = RowParallelLinear(SHAPE[1], SHAPE[1], tp=solo(), dtype=torch.float32, linear=deferred_linear)
        self.linear.weight = nn.Parameter(torch.eye(SHAPE[1]))
        self.linear.weight.grad = torch.zeros(SHAPE[1], SHAPE[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.add(x)
        self.most.append(len(self.inputs.alive()))
        out: torch.Tensor = self.linear(x)
        self.outputs.add(out)
        return out


class _Sum(_Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


class _Chain(nn.Module):
    """x [7, 11] through as many stages as the placement has."""

    def __init__(self, num_stages: int, watch: tuple[Watch, Watch, list[int]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            PipelineBlock(lambda kind=kind: kind(*watch), name=str(stage), stage=stage, outputs=_declared(kind))  # type: ignore[misc]
            for stage, kind in enumerate((*(_Layer,) * (num_stages - 1), _Sum))
        )

    def forward(self, *, x: TensorPointer) -> TensorPointer:
        for block in self.blocks:
            x = block(x=x)
        return x


def _declared(kind: type[nn.Module]) -> Any:
    from trainer.pipeline.graph import Meta

    shape = () if kind is _Sum else SHAPE
    return lambda **_: Meta(shape=shape, dtype="float32", is_floating=True)


class Wire:
    """Plays `send`, `receive` and `wait`. At each send it counts storages that travelled, and open sends."""

    def __init__(self) -> None:
        self.inputs, self.outputs, self.travelling = Watch(), Watch(), Watch()
        self.most_inputs: list[int] = []
        self.most_outputs = self.most_alive = self.open_sends = self.most_open_sends = 0

    def send(self, tensors: Sequence[torch.Tensor], peer: int, group: Group) -> list[Any]:
        for tensor in tensors:
            self.travelling.add(tensor)
        self.most_alive = max(self.most_alive, len(self.travelling.alive()))
        self.most_outputs = max(self.most_outputs, len(self.outputs.alive()))
        self.open_sends += 1
        self.most_open_sends = max(self.most_open_sends, self.open_sends)
        return ["send"]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, group: Group) -> list[Any]:
        for tensor in tensors:
            tensor.fill_(1.0)
            self.travelling.add(tensor)
        return []

    def wait(self, handles: Sequence[Any]) -> None:
        self.open_sends -= len(handles)


def run(schedule: Schedule, rank: int, monkeypatch: pytest.MonkeyPatch, *, is_training: bool = True) -> Wire:
    """One step of pipeline rank `rank`, every other rank played by the wire."""
    wire, placement = Wire(), schedule.placement
    model = _Chain(placement.num_stages, (wire.inputs, wire.outputs, wire.most_inputs))
    for name in ("send", "receive", "wait"):
        monkeypatch.setattr(module, name, getattr(wire, name))
    monkeypatch.setattr("trainer.pipeline.engine.parts.wait", wire.wait)
    graph = trace(model, {"x": torch.zeros(SHAPE, device="meta")})
    pp = Group(ranks=tuple(range(placement.p)), rank=rank, pg=None)
    blocks: Any = [model.blocks[stage] for stage in placement.stages_of(rank)]
    modules = {block.name: block.build() for block in blocks}
    interpreter = Interpreter(graph, modules, placement=placement, pp=pp, device=torch.device("cpu"))
    fields = [{"x": torch.ones(SHAPE)} for _ in range(schedule.m)]
    interpreter.run(validate(schedule, graph.links).lists[rank], fields, is_training=is_training)
    return wire


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_sent_does_not_pile_up(rank: int, is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(m: int) -> Wire:
        made = make_schedule("1f1b", p=P, m=m) if is_training else forward_only(Placement.loop(P), m)
        return run(made, rank, monkeypatch, is_training=is_training)

    few, many = step(8), step(40)
    assert few.most_alive == many.most_alive
    assert few.most_open_sends == many.most_open_sends == P + 1
    assert few.open_sends == many.open_sends == 0, "the rest is waited for at the end"


@pytest.mark.parametrize(
    ("name", "v"), [("1f1b", 1), ("afab", 2), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_activations_live_as_long_as_the_schedule_says(name: str, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of linear layers: from F to B, or to W where it comes later. Rank 0's own are fields of the batch."""
    schedule = make_schedule(name, p=P, m=7, v=v)
    for rank in range(1, P):
        assert max(run(schedule, rank, monkeypatch).most_inputs) == peaks(schedule).together[rank]


def test_an_output_is_let_go_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its backward is over: autograd starts from its place in the graph and needs no numbers of it."""
    wire = run(make_schedule("afab", p=P, m=20), 0, monkeypatch)
    assert 0 < wire.most_outputs <= P + 2


def test_an_interrupted_step_leaves_no_weight_gradient_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    deferred_linear(x, nn.Parameter(torch.ones(3, SHAPE[1]))).sum().backward()
    run(make_schedule("1f1b", p=P, m=2), 1, monkeypatch)
