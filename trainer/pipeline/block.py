"""PipelineBlock and TensorPointer: how a model says what runs where.

A model is written as one process would write it; each block is built only on the stage that owns it. The model's
`forward` runs once, under the tracer, and what flows between blocks are TensorPointers: shapes without numbers. Any
computation on a pointer outside a block would be lost, since the interpreter only ever calls blocks; so it raises, on
every layout, pp = 1 included.
"""

import traceback
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import nn

from trainer.errors import ConfigError
from trainer.pipeline.graph import FieldRef, Meta, ValueRef

OutputShapes = Callable[..., Meta | tuple[Meta, ...]]


class PointerError(ConfigError, TypeError):
    """The model computes on a TensorPointer outside a PipelineBlock."""


class Recorder(Protocol):
    """What notes the calls of blocks while a model is traced."""

    def record(self, block: "PipelineBlock", inputs: dict[str, Any]) -> Any: ...


class TensorPointer:
    """Stands for a tensor that some stage will hold. It has a shape and a dtype name, and supports no operation."""

    __slots__ = ("meta", "recorder", "ref")

    def __init__(self, *, recorder: Recorder, ref: FieldRef | ValueRef, meta: Meta | None) -> None:
        self.recorder, self.ref, self.meta = recorder, ref, meta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape if self.meta is not None else ()

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"the attribute .{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"torch's {getattr(func, '__name__', func)}")


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS = "neg pos abs invert lt le gt ge eq ne bool len iter getitem setitem contains float int index"
_OPERATORS = (
    *_OTHERS.split(),
    *(prefix + name for name in _BINARY.split() for prefix in ("", "r")),
)  # fmt: skip


def _refusing(name: str) -> Callable[..., NoReturn]:
    def operator(self: TensorPointer, *others: Any) -> NoReturn:
        _refuse(f"the operator {name}")

    return operator


for _name in _OPERATORS:
    setattr(TensorPointer, f"__{_name}__", _refusing(_name))
TensorPointer.__hash__ = object.__hash__  # type: ignore[method-assign]


def _refuse(what: str) -> NoReturn:
    frame = [f for f in traceback.extract_stack() if f.filename != __file__ and "/torch/" not in f.filename][-1]
    raise PointerError(
        f"{frame.filename}:{frame.lineno}: `{frame.line}` uses {what} on the output of a PipelineBlock, outside any "
        "block. Only blocks run during training, so this would be lost. Move the computation into a PipelineBlock."
    )


class PipelineBlock(nn.Module):
    """One node of the model's DAG, on stage `stage`.

    `builder` makes the inner module and is called on the owning stage. `name` prefixes the inner module's parameter
    names; together they are the live names. `outputs` says the outputs' shapes from the inputs' (Metas by keyword);
    without it the tracer builds the module and runs it once on the meta device. Declare it where start-up counts: the
    first meta operation of a process makes torch import sympy and its compiler, two seconds of every restart.
    `layer`: which of the model's repeated layers this is, from 0; those can be recomputed in backward.
    """

    def __init__(
        self, builder: Callable[[], nn.Module], *, name: str, stage: int, outputs: OutputShapes | None = None,
        layer: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.builder, self.name, self.stage, self.outputs, self.layer = builder, name, stage, outputs, layer
        self.module: nn.Module | None = None

    def build(self) -> nn.Module:
        """Make the inner module on this process; called by the owner only."""
        self.module = self.builder()
        return self.module

    def forward(self, **inputs: Any) -> Any:
        """Only under the tracer: notes the call and returns a pointer per output."""
        recorders = [value.recorder for value in inputs.values() if isinstance(value, TensorPointer)]
        if not recorders:
            raise PointerError(
                f"PipelineBlock {self.name!r} was called without any TensorPointer. A model's forward is traced by the "
                "engine, and every block needs at least one input that is a batch field or another block's output."
            )
        return recorders[0].record(self, inputs)
