"""Tracing: run the model's `forward` once on meta tensors and keep the graph of blocks.

Every rank traces the whole model (meta tensors cost nothing), so each knows the shapes of all that it will receive.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.pipeline.block import PipelineBlock, PointerError, TensorPointer
from trainer.pipeline.graph import FieldRef, Graph, Meta, Node, ValueRef


class Tracer:
    """Notes blocks in call order and computes their outputs' shapes on fresh meta copies."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self.nodes: list[Node] = []
        self.values: dict[ValueRef, torch.Tensor] = {}

    def pointers(self) -> dict[str, TensorPointer]:
        """The model's arguments: one pointer per batch field."""
        return {
            name: TensorPointer(
                recorder=self, ref=FieldRef(name), meta=_meta(value) if isinstance(value, torch.Tensor) else None
            )
            for name, value in self.fields.items()
        }

    def record(self, block: PipelineBlock, inputs: dict[str, Any]) -> Any:
        for keyword, value in inputs.items():
            if not isinstance(value, TensorPointer):
                raise PointerError(
                    f"PipelineBlock {block.name!r} got {type(value).__name__} for {keyword!r}: inputs are batch fields "
                    "and outputs of other blocks. Give constants to the block's builder."
                )
        with torch.no_grad():
            out = block.builder().to("meta")(**{key: self._value(pointer.ref) for key, pointer in inputs.items()})
        outputs = out if isinstance(out, tuple) else (out,)
        node = Node(
            index=len(self.nodes), block=block.name, stage=block.stage,
            inputs=tuple((key, pointer.ref) for key, pointer in inputs.items()),
            outputs=tuple(_meta(tensor) for tensor in outputs),
        )  # fmt: skip
        self.nodes.append(node)
        refs = [ValueRef(node.index, i) for i in range(len(outputs))]
        self.values.update(zip(refs, outputs, strict=True))
        pointers = tuple(TensorPointer(recorder=self, ref=ref, meta=self.meta(ref)) for ref in refs)
        return pointers if isinstance(out, tuple) else pointers[0]

    def meta(self, ref: ValueRef) -> Meta:
        return self.nodes[ref.node].outputs[ref.output]

    def _value(self, ref: FieldRef | ValueRef) -> Any:
        return self.fields[ref.name] if isinstance(ref, FieldRef) else self.values[ref]


def trace(model: nn.Module, fields: Mapping[str, Any]) -> Graph:
    """The graph of `model(**fields)`. `fields`: meta tensors or plain numbers.

    Raises PointerError for a computation outside a block, or when something must travel to an earlier stage.
    """
    tracer = Tracer(fields)
    loss = model(**tracer.pointers())
    if not isinstance(loss, TensorPointer) or not isinstance(loss.ref, ValueRef):
        raise PointerError("the model's forward must return the loss: the output of its last PipelineBlock.")
    graph = Graph(nodes=tuple(tracer.nodes), loss=loss.ref)
    for source, target in graph.links:
        if source > target:
            raise PointerError(
                f"a block on stage {target} needs the output of a block on the later stage {source}; "
                "put blocks on stages in the order in which they run."
            )
    return graph


def _meta(x: torch.Tensor) -> Meta:
    return Meta(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."), is_floating=x.is_floating_point())
