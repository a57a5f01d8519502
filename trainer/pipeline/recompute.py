"""Recomputation (activation checkpointing): a block that keeps less of its forward and makes it again in backward.

    none        everything that backward needs is kept
    selective   kept: the block's input and the products of its linear layers; made again: norms, rotary positions, the
                attention core and the element-wise part of the feed-forward
    full        kept: the block's input; made again: the whole forward

What is made again is made by the same operations on the same numbers, so nothing changes by a bit. Tensor-parallel
collectives of the forward run again too, in the same order on all ranks: each of them stops at the same place. But in a
compiled layer what to keep is chosen inside the graph, where nothing that communicates is made again: there selective
keeps what collectives brought as well, and is equal to rounding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Call = Callable[..., Any]

# The products of linear layers, as they arrive at the dispatcher. Batched products are not among them: those are
# attention scores, the largest of all.
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default})
_BROUGHT = frozenset(
    getattr(torch.ops.pawl, name).default for name in ("sum_over", "gather_tokens", "scatter_tokens")
)  # fmt: skip


def recomputed(module: Call, mode: str, compiled: Callable[[Call], Call] | None = None) -> Call:
    """A block as the interpreter calls it, recomputed in backward as `mode` (none, selective, full) says.

    compiled: makes a compiled call of one. A whole forward is made again by the same kernels, from outside of them;
    of its parts only the compiler knows, so it is shown the selection.
    """
    match mode:
        case "none":
            return compiled(module) if compiled else module
        case "full":
            return partial(_whole, compiled(module) if compiled else module)
        case "selective":
            if compiled:
                return compiled(partial(_selective, module, _contexts(_PRODUCTS | _BROUGHT)))
            return partial(_selective, module, _contexts(_PRODUCTS))
    raise ValueError(f"recompute {mode!r} is none of none, selective, full")


def _whole(call: Call, **inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(**inputs)
    return checkpoint(call, use_reentrant=False, preserve_rng_state=False, **inputs)


def _selective(call: Call, contexts: Call, **inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(**inputs)
    return checkpoint(call, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **inputs)


def _contexts(kept: frozenset[Any]) -> Call:
    """What `checkpoint` wants to be told about which operators' results are kept."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept))


def _policy(kept: frozenset[Any], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
