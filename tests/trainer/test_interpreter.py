"""The interpreter in one process, messages played by a stub: what it keeps alive does not grow with micro-batches."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from trainer.comm import Group
from trainer.pipeline.block import PipelineBlock, TensorPointer
from trainer.pipeline.engine import interpreter as module
from trainer.pipeline.engine.interpreter import Interpreter
from trainer.pipeline.generators import forward_only, make_schedule
from trainer.pipeline.schedule import Placement
from trainer.pipeline.trace import trace
from trainer.pipeline.validate import validate

P, SHAPE = 3, (7, 11)


class _Scale(nn.Module):
    """x, a number or [7, 11] → [7, 11]."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class _Chain(nn.Module):
    """A number through three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            PipelineBlock(builder, name=str(stage), stage=stage) for stage, builder in enumerate((_Scale, _Scale, _Sum))
        )

    def forward(self, *, x: TensorPointer) -> TensorPointer:
        for block in self.blocks:
            x = block(x=x)
        return x


class Wire:
    """Plays `send`, `receive` and `wait`. At each send it counts the tensors that travel or might, and open sends."""

    def __init__(self) -> None:
        self.most_alive = self.open_sends = self.most_open_sends = 0

    def send(self, tensors: Sequence[torch.Tensor], peer: int, group: Group) -> list[Any]:
        found = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == SHAPE]
        self.most_alive = max(self.most_alive, len(found))
        self.open_sends += 1
        self.most_open_sends = max(self.most_open_sends, self.open_sends)
        return ["send"]

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, group: Group) -> list[Any]:
        for tensor in tensors:
            tensor.fill_(1.0)
        return []

    def wait(self, handles: Sequence[Any]) -> None:
        self.open_sends -= len(handles)


def run(stage: int, m: int, *, is_training: bool, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire, model = Wire(), _Chain()
    for name in ("send", "receive", "wait"):
        monkeypatch.setattr(module, name, getattr(wire, name))
    graph = trace(model, {"x": torch.zeros((), device="meta")})
    made = make_schedule("1f1b", p=P, m=m) if is_training else forward_only(Placement.loop(P), m)
    schedule = validate(made, graph.links).lists
    pp = Group(ranks=tuple(range(P)), rank=stage, pg=None)
    block: Any = model.blocks[stage]
    interpreter = Interpreter(graph, {block.name: block.build()}, stage=stage, pp=pp, device=torch.device("cpu"))
    interpreter.run(schedule[stage], [{"x": torch.ones(())} for _ in range(m)], is_training=is_training)
    return wire


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_was_sent_does_not_pile_up(stage: int, is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (run(stage, m, is_training=is_training, monkeypatch=monkeypatch) for m in (8, 40))
    assert few.most_alive == many.most_alive
    assert few.most_open_sends == many.most_open_sends == P + 1
    assert few.open_sends == many.open_sends == 0, "the rest is waited for at the end"
