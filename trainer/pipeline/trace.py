"""Tracing: run the model's `forward` once on pointers and keep the graph of blocks.

Every rank traces the whole model, so each knows the shapes of all that it will receive. A block that declares its
outputs' shapes is believed (a test holds the declarations against torch); any other runs once on the meta device.
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
        out = self._declared(block, inputs) if block.outputs is not None else self._run(block, inputs)
        outputs = out if isinstance(out, tuple) else (out,)
        node = Node(
            index=len(self.nodes), block=block.name, stage=block.stage,
            inputs=tuple((key, pointer.ref) for key, pointer in inputs.items()),
            outputs=outputs,
        )  # fmt: skip
        self.nodes.append(node)
        refs = [ValueRef(node.index, i) for i in range(len(outputs))]
        pointers = tuple(TensorPointer(recorder=self, ref=ref, meta=self.meta(ref)) for ref in refs)
        return pointers if isinstance(out, tuple) else pointers[0]

    def meta(self, ref: ValueRef) -> Meta:
        return self.nodes[ref.node].outputs[ref.output]

    def _declared(self, block: PipelineBlock, inputs: dict[str, TensorPointer]) -> Meta | tuple[Meta, ...]:
        assert block.outputs is not None
        return block.outputs(**{key: pointer.meta for key, pointer in inputs.items()})

    def _run(self, block: PipelineBlock, inputs: dict[str, TensorPointer]) -> Meta | tuple[Meta, ...]:
        with torch.no_grad():
            out = block.builder().to("meta")(**{key: self._value(pointer.ref) for key, pointer in inputs.items()})
        return tuple(_meta(tensor) for tensor in out) if isinstance(out, tuple) else _meta(out)

    def _value(self, ref: FieldRef | ValueRef) -> Any:
        if isinstance(ref, FieldRef):
            return self.fields[ref.name]
        meta = self.meta(ref)
        return torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")


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
