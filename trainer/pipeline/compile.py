"""Compiling: each decoder layer runs as one graph, made by torch.compile before the first step.

    layers.0 ─┐
    layers.1 ─┼─▶ one graph (its weights are inputs) ─▶ forward kernels, backward kernels
    layers.2 ─┘

Layers that are built alike share one graph, so a rank compiles once for training and once for validation, not for
every layer. A graph that would break in two is an error. What a layer does besides computing (noting a weight gradient,
a tensor-parallel collective) is done by operators that the compiler may neither drop, merge nor reorder.

The numbers are eager's up to rounding: fused operations round less often, and sums may be taken in another order.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._library.effects import EffectType

from trainer.errors import ConfigError
from trainer.layers.deferred import take_noted
from trainer.pipeline.engine.parts import Call, empty
from trainer.pipeline.graph import FieldRef, Graph, Node, ValueRef
from trainer.toolchain import cpp_command, cpp_compiler

ORDERED_OPERATORS = (
    "pawl::linear_input_grad", "pawl::sum_over", "pawl::gather_tokens", "pawl::scatter_tokens",
)  # fmt: skip
"""Those that do something besides computing; all ranks must do it in one order, and none of it may be left out."""

# A note of a weight gradient holds tensors of the graph until the schedule's W, after the graph has ended: the compiler
# must not write anything else into their memory.
OPTIONS: Mapping[str, Any] = {"inplace_buffers": False, "allow_buffer_reuse": False}


def require_compiler(device: torch.device) -> None:
    """Raises ConfigError where nothing can be compiled for `device`."""
    if device.type == "cpu" and cpp_compiler() is None:
        raise ConfigError(
            f"model.compile: block needs a C++ compiler to train on a CPU, and {cpp_command()} is not on this machine. "
            "Install it (Debian/Ubuntu: apt-get install -y g++), or set model.compile: none."
        )


class BlockCompiler:
    """Compiles the blocks of one engine. `backend`: torch.compile's; another one only in tests.

    Raises ConfigError where nothing can be compiled for `device`.
    """

    def __init__(self, device: torch.device, *, backend: str | Callable[..., Any] = "inductor") -> None:
        if backend == "inductor":
            require_compiler(device)
        for name in ORDERED_OPERATORS:
            torch.library._register_effectful_op(name, EffectType.ORDERED)
        # One compiled function for all blocks: a second layer finds the graph of the first.
        self._run: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
            _run, fullgraph=True, dynamic=False, backend=backend, isolate_recompiles=True,
            options=dict(OPTIONS) if backend == "inductor" else None,
        )  # fmt: skip

    def compiled(self, call: Call) -> Call:
        """What is called in place of `call`: a block, or one recomputed in part. Compiled at first call: `warm_up`."""
        return partial(self._run, call)


def _run(call: Call, **inputs: Any) -> Any:
    return call(**inputs)


def warm_up(
    graph: Graph, names: Collection[str], calls: Mapping[str, Call], modules: Mapping[str, nn.Module], *,
    fields: Mapping[str, Any], device: torch.device, is_training: bool,
) -> None:  # fmt: skip
    """Call those of the blocks `names` that this rank has, on zeros, so that they are compiled and steps only run them.

    modules: the blocks of this rank. fields: a batch's. No gradient, weight, note or state of a generator is changed.
    Comm: the blocks' collectives (tp), those of forward twice.
    """
    inputs_of = _zero_inputs(graph, modules, fields=fields, device=device, is_training=is_training)
    nodes = [node for node in graph.nodes if node.block in modules and node.block in names]
    with _no_gradients(modules[node.block] for node in nodes):
        for node in nodes:
            _try(calls[node.block], modules[node.block], inputs_of(node), is_training=is_training)


def _try(call: Call, module: nn.Module, inputs: Mapping[str, Any], *, is_training: bool) -> None:
    with torch.no_grad():
        module(**inputs)  # as it is: what it makes at its first call and keeps, it makes outside of the graph
    with torch.set_grad_enabled(is_training):
        out = call(**inputs)
    ends = [x for x in (out if isinstance(out, tuple) else (out,)) if x.requires_grad]
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if ends and leaves:
        torch.autograd.grad(ends, leaves, [torch.zeros_like(x) for x in ends], allow_unused=True)
    take_noted()


@contextmanager
def _no_gradients(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Parameters without .grad for a while: torch's tracer takes none whose gradient is wider than itself."""
    held = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad


def _zero_inputs(
    graph: Graph, modules: Mapping[str, nn.Module], *, fields: Mapping[str, Any], device: torch.device,
    is_training: bool,
) -> Callable[[Node], dict[str, Any]]:  # fmt: skip
    """Makes a node's inputs as the interpreter would, of zeros."""
    parameters = {name for name, module in modules.items() if any(True for _ in module.parameters())}
    with_gradients = inputs_with_gradients(graph, parameters)

    def make(node: Node, key: str, ref: FieldRef | ValueRef) -> Any:
        if isinstance(ref, FieldRef):
            return fields[ref.name]
        zero = empty(graph.meta(ref), device, needs_grad=False).zero_()
        return zero.requires_grad_(is_training and (node.index, key) in with_gradients)

    return lambda node: {key: make(node, key, ref) for key, ref in node.inputs}


def inputs_with_gradients(graph: Graph, parameters: Collection[str]) -> frozenset[tuple[int, str]]:
    """(node, keyword) of the inputs that take part in backward; `parameters`: names of the blocks that have any.

    Of a stage's own values those that a parameter has a part in; of others' all floating ones, since they are handed
    over as leaves that collect a gradient.
    """
    inputs: set[tuple[int, str]] = set()
    values: set[ValueRef] = set()
    for node in graph.nodes:
        refs = [(key, ref) for key, ref in node.inputs if isinstance(ref, ValueRef) and graph.meta(ref).is_floating]
        mine = {key for key, ref in refs if ref in values or graph.nodes[ref.node].stage != node.stage}
        inputs |= {(node.index, key) for key in mine}
        if mine or node.block in parameters:
            values |= {ValueRef(node.index, index) for index in range(len(node.outputs))}
    return frozenset(inputs)
