"""A model's blocks on one rank: which are built, what each is called by, and fields to try them on."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from trainer.pipeline.block import PipelineBlock
from trainer.pipeline.compile import BlockCompiler
from trainer.pipeline.engine.parts import Call
from trainer.pipeline.recompute import recomputed


def blocks_of(model: nn.Module) -> list[PipelineBlock]:
    """All blocks, in the order in which the model has them."""
    return [module for module in model.modules() if isinstance(module, PipelineBlock)]


def build_stages(model: nn.Module, stages: Collection[int]) -> dict[str, nn.Module]:
    """Build the blocks of these stages, by name."""
    return {block.name: block.build() for block in blocks_of(model) if block.stage in stages}


def block_calls(
    model: nn.Module, modules: Mapping[str, nn.Module], recompute_of: Callable[[int], str],
    compiler: BlockCompiler | None,
) -> dict[str, Call]:  # fmt: skip
    """What runs each block of this rank: its module, and for a layer the module compiled, recomputed, or both."""
    calls: dict[str, Call] = dict(modules)
    for block in blocks_of(model):
        if block.name in modules and block.layer is not None:
            compiled = None if compiler is None else compiler.compiled
            calls[block.name] = recomputed(modules[block.name], recompute_of(block.layer), compiled)
    return calls


def layer_names(model: nn.Module) -> set[str]:
    """The blocks that are one of the model's repeated layers."""
    return {block.name for block in blocks_of(model) if block.layer is not None}


def zero_fields(shape_BT: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """A micro-batch's fields, of zeros."""
    names = ("input_ids", "labels", "position_ids")
    tensors = {name: torch.zeros(shape_BT, dtype=torch.int64, device=device) for name in names}
    return {**tensors, "num_valid": 1.0}
