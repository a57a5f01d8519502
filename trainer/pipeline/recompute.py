"""Recomputation (activation checkpointing): a block that keeps less of its forward and makes it again in backward.

    none        everything that backward needs is kept
    selective   kept: the block's input and the products of its linear layers; made again: norms, rotary positions, the
                attention core and the element-wise part of the feed-forward
    full        kept: the block's input; made again: the whole forward

What is made again is made by the same operations on the same numbers, so nothing changes by a bit. Tensor-parallel
collectives of the forward run again too, in the same order on all ranks: each of them stops at the same place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Call = Callable[..., Any]

# The products of linear layers, as they arrive at the dispatcher. Batched products are not among them: those are
# attention scores, the largest of all.
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default})


def recomputed(module: nn.Module, mode: str) -> Call:
    """`module` as the interpreter calls it, recomputed in backward as `mode` (none, selective, full) says."""
    match mode:
        case "none":
            return module
        case "full":
            return partial(_call, module, {})
        case "selective":
            return partial(_call, module, {"context_fn": partial(create_selective_checkpoint_contexts, _policy)})
    raise ValueError(f"recompute {mode!r} is none of none, selective, full")


def _call(module: nn.Module, how: dict[str, Any], **inputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return module(**inputs)
    return checkpoint(module, use_reentrant=False, preserve_rng_state=False, **how, **inputs)


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
