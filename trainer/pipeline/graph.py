"""The traced model as data: nodes in topological order, each on a stage, and what travels between stages. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Shape and dtype name of a tensor; `is_floating` says whether a gradient travels back."""

    shape: tuple[int, ...]
    dtype: str
    is_floating: bool


@dataclass(frozen=True, slots=True, order=True)
class FieldRef:
    """A field of the micro-batch, which every stage reads for itself."""

    name: str


@dataclass(frozen=True, slots=True, order=True)
class ValueRef:
    """Output number `output` of node number `node`."""

    node: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One call of a block. `inputs` are (keyword, where from); constants are neither traced nor sent."""

    index: int
    block: str
    stage: int
    inputs: tuple[tuple[str, FieldRef | ValueRef], ...]
    outputs: tuple[Meta, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All nodes, and the value that is the loss."""

    nodes: tuple[Node, ...]
    loss: ValueRef

    def on_stage(self, stage: int) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.stage == stage)

    def meta(self, value: ValueRef) -> Meta:
        return self.nodes[value.node].outputs[value.output]

    @property
    def loss_stage(self) -> int:
        return self.nodes[self.loss.node].stage

    @cached_property
    def edges(self) -> dict[tuple[int, int], tuple[ValueRef, ...]]:
        """(source stage, consuming stage) → values that travel, in a fixed order. Each value travels once per stage."""
        crossing = {(self.nodes[v.node].stage, node.stage, v) for node, v in self._uses()}
        edges: dict[tuple[int, int], tuple[ValueRef, ...]] = {}
        for source, target, value in sorted(crossing):
            if source != target:
                edges[source, target] = (*edges.get((source, target), ()), value)
        return edges

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages between which something travels."""
        return tuple(self.edges)

    def floating(self, source: int, target: int) -> tuple[ValueRef, ...]:
        """The values of an edge whose gradients travel back."""
        return tuple(v for v in self.edges[source, target] if self.meta(v).is_floating)

    def _uses(self) -> Iterator[tuple[Node, ValueRef]]:
        for node in self.nodes:
            for _, ref in node.inputs:
                if isinstance(ref, ValueRef):
                    yield node, ref
