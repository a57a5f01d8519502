"""What the interpreter knows of each stage beforehand, and what it keeps of each micro-batch on it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from trainer.comm import wait
from trainer.layers.deferred import WeightGradient, add_weight_gradient, take_noted
from trainer.layers.linear import ColumnParallelLinear, RowParallelLinear
from trainer.pipeline.graph import Graph, Meta, Node, ValueRef
from trainer.pipeline.schedule import Placement

Handles = list[Any]
Call = Callable[..., Any]
Complete = Callable[[nn.Parameter], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One stage of this rank. `travelling`: its values that other stages need; targets and sources are stages."""

    nodes: tuple[tuple[Node, Call], ...]
    travelling: tuple[ValueRef, ...]
    loss: ValueRef | None
    local_targets: tuple[int, ...]
    remote_targets: tuple[int, ...]
    local_sources: tuple[int, ...]
    remote_sources: tuple[int, ...]


def stage_part(graph: Graph, calls: Mapping[str, Call], stage: int, placement: Placement) -> StagePart:
    """The stage as `graph` has it; what runs its blocks must be among `calls`."""
    targets = [target for source, target in graph.links if source == stage]
    sources = [source for source, target in graph.links if target == stage]

    def by_place(stages: Sequence[int], *, is_local: bool) -> tuple[int, ...]:
        here = placement.ranks[stage]
        return tuple(other for other in stages if (placement.ranks[other] == here) == is_local)

    return StagePart(
        nodes=tuple((node, calls[node.block]) for node in graph.on_stage(stage)),
        travelling=tuple(sorted({ref for target in targets for ref in graph.edges[stage, target]})),
        loss=graph.loss if graph.loss_stage == stage else None,
        local_targets=by_place(targets, is_local=True),
        remote_targets=by_place(targets, is_local=False),
        local_sources=by_place(sources, is_local=True),
        remote_sources=by_place(sources, is_local=False),
    )


def linear_names(module: nn.Module) -> tuple[str, ...]:
    """Names in `module` of all weights whose gradient may be deferred."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    return tuple(f"{name}.weight".lstrip(".") for name, at in module.named_modules() if isinstance(at, kinds))


def linear_weights(modules: Iterable[nn.Module]) -> dict[int, nn.Parameter]:
    """Address → weight, for those of `linear_names`."""
    weights = [module.get_parameter(name) for module in modules for name in linear_names(module)]
    return {weight.data_ptr(): weight for weight in weights}


class Watch:
    """Who wants to know how far a step has come; this one does not."""

    is_last_backward = False
    """Set while the last backward of a stage runs in a step."""

    def before_block(self, block: str) -> None:
        """A block is about to run forward."""

    def after_backward(self) -> None:
        """A backward is over, weight gradients of matrices apart."""

    def complete(self, parameter: nn.Parameter) -> None:
        """A matrix has its last gradient of the step."""


def empty(meta: Meta, device: torch.device, *, needs_grad: bool) -> torch.Tensor:
    """A buffer to receive into, a leaf of autograd where a gradient will come back."""
    buffer = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=device)
    return buffer.requires_grad_(needs_grad and meta.is_floating)


class WeightGradients:
    """Adds noted weight gradients: those of a B behind its backward, block by block, those of a W when it runs.

    A stage's notes would be most of its activations; recomputation would save next to nothing if all of them waited
    for the end of B.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._weights = linear_weights(modules)
        self._complete: Complete | None = None
        self._is_behind = False

    def watched(self, call: Call) -> Call:
        """`call`, a block; in backward what was noted after it in the stage is added before it is passed."""

        def run(**inputs: Any) -> Any:
            out = call(**inputs)
            for tensor in out if isinstance(out, tuple) else (out,):
                if tensor.requires_grad:
                    tensor.register_hook(self._passed)
            return out

        return run

    def backward(
        self, roots: list[GradientEdge], gradients: list[torch.Tensor | None], is_whole: bool,
        complete: Complete | None,
    ) -> list[WeightGradient]:  # fmt: skip
        """Run autograd. `is_whole`: a B, which adds what is noted; else it is returned. `complete` as in `add`."""
        self._is_behind, self._complete = is_whole, complete
        torch.autograd.backward(roots, gradients)
        self._is_behind = False
        notes = take_noted()
        if not is_whole:
            return notes
        self.add(notes, complete)
        return []

    def add(self, notes: Sequence[WeightGradient], complete: Complete | None) -> None:
        """Add them in their order; `complete` is told of each weight for which nothing more is noted."""
        left = Counter(note.weight for note in notes)
        for note in notes:
            add_weight_gradient(self._weights[note.weight], note)
            left[note.weight] -= 1
            if complete is not None and not left[note.weight]:
                complete(self._weights[note.weight])

    def _passed(self, _: torch.Tensor) -> None:
        if self._is_behind:
            self.add(take_noted(), self._complete)


@dataclass(slots=True)
class MicroBatch:
    """What one micro-batch keeps on one stage between its actions.

    received: inputs from other stages, leaves of autograd. outputs: what is still to be sent. roots, loss: where
    backward starts, without the outputs' numbers. arriving: gradients by consuming stage. pending: what W will add.
    """

    received: dict[ValueRef, torch.Tensor] = field(default_factory=dict)
    outputs: dict[ValueRef, torch.Tensor] = field(default_factory=dict)
    unsent: int = 0
    roots: dict[ValueRef, GradientEdge] = field(default_factory=dict)
    loss: GradientEdge | None = None
    arriving: dict[int, dict[ValueRef, torch.Tensor]] = field(default_factory=dict)
    to_send_back: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    pending: list[WeightGradient] = field(default_factory=list)
    incoming: Handles = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all that was to be received is here."""
        wait(self.incoming)
        self.incoming = []

    def keep(self, outputs: dict[ValueRef, torch.Tensor], *, unsent: int) -> None:
        """Keep outputs for `unsent` messages, and where backward starts for as long as it takes."""
        self.roots = {ref: get_gradient_edge(x) for ref, x in outputs.items() if x.requires_grad}
        self.outputs, self.unsent = outputs if unsent else {}, unsent

    def outgoing(self, refs: Sequence[ValueRef]) -> list[torch.Tensor]:
        """The values of one message; after the last one the outputs are let go."""
        tensors = [self.outputs[ref].detach() for ref in refs]
        self.unsent -= 1
        if not self.unsent:
            self.outputs = {}
        return tensors

    def backward_arguments(self) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
        """(roots, their gradients) for autograd; those of several consumers are added in the order of stages."""
        roots = [] if self.loss is None else [self.loss]
        gradients: list[torch.Tensor | None] = [None] * len(roots)  # autograd's 1
        for ref, root in self.roots.items():
            arrived = [self.arriving[stage][ref] for stage in sorted(self.arriving) if ref in self.arriving[stage]]
            if arrived:
                roots.append(root)
                gradients.append(sum(arrived[1:], start=arrived[0]))
        return roots, gradients

    def release(self) -> None:
        """Let go of all that backward needed."""
        self.received, self.outputs, self.roots, self.loss, self.arriving = {}, {}, {}, None, {}
