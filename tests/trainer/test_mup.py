"""Coordinate check (arXiv 2203.03466, appendix D): under spectral muP no layer's change per step depends on the width.

A few Adam steps at widths 64 to 512, same learning rate, same batches. For each module's output and for the logits the
RMS of the change on a fixed batch is fitted as width^slope.

Expected slopes. muP: 0 for every layer. The logits' change is ΔW·h, slope 0, plus W·Δh, a sum over D of fixed random
numbers that dies out as width^(-1/2): its share is small once the head has moved, hence the higher rate for the logits.
Standard: a matrix sums fan_in updates of size lr that agree in sign, slope 1 and more. The bound of 1/4 is half of the
smallest exponent that any single error makes: 1/2, by an attention or output factor of √width or a σ off by as much.
"""

from functools import partial

import numpy as np
import pytest
import torch
from engine_world import logits_of, solo_engine, tiny_batch, tiny_config
from torch import nn

from trainer.config import model as c
from trainer.data.batch import StepBatch
from trainer.engine import Engine

WIDTHS = (64, 128, 256, 512)
STEPS = 4
LR, LR_LOGITS = 2e-3, 1e-2
BOUND = 0.25


def config_of(width: int, *, use_mup: bool, tied: bool, kind: str) -> c.Config:
    """Everything that is a width grows with it, the head size too; numbers of heads, layers and words do not."""
    config = tiny_config(use_mup=use_mup, tied=tied, clip=None, model_type=kind)
    shape = config.model.model_config_.model_copy(
        update={"hidden_size": width, "intermediate_size": 2 * width, "head_dim": width // 4}
    )
    return config.model_copy(
        update={"model": c.Model(model_config=shape, dtype="float32", init_method=config.model.init_method)}
    )


def outputs_of(engine: Engine, batch: StepBatch) -> dict[str, torch.Tensor]:
    """What every module gives on the batch, its final norm before the multiplier, and the logits."""
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name: str, module: nn.Module, args: object, out: torch.Tensor) -> None:
        seen.setdefault(name, []).append(out.detach())

    hooks = [
        module.register_forward_hook(partial(note, f"{block}.{inner}" if inner else block))
        for block, root in engine._modules.items()
        for inner, module in root.named_modules()
        if block != "lm_head" and "rotary" not in inner and (block, inner) != ("model", "")
    ]  # fmt: skip
    logits = logits_of(engine, batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(parts) for name, parts in seen.items()} | {"logits": logits}


def changes(width: int, *, use_mup: bool, tied: bool, lr: float, kind: str) -> dict[str, float]:
    """RMS of what four steps changed of each output."""
    engine = solo_engine(config_of(width, use_mup=use_mup, tied=tied, kind=kind))
    probe = tiny_batch(99)
    before = outputs_of(engine, probe)
    for step in range(STEPS):
        engine.train_step(tiny_batch(step), lr=lr, weight_decay=0.0, adam_t=step + 1)
    return {name: float((out - before[name]).square().mean().sqrt()) for name, out in outputs_of(engine, probe).items()}


def slopes(*, use_mup: bool, tied: bool, lr: float, kind: str = "llama") -> dict[str, float]:
    table = [changes(width, use_mup=use_mup, tied=tied, lr=lr, kind=kind) for width in WIDTHS]
    logs = np.log2(WIDTHS)
    return {name: float(np.polyfit(logs, np.log2([row[name] for row in table]), 1)[0]) for name in table[0]}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_changes_per_step_do_not_depend_on_the_width(tied: bool) -> None:
    """P10 (nanotron#123, gpt-neox#956)."""
    hidden = slopes(use_mup=True, tied=tied, lr=LR)
    hidden.pop("logits")
    assert len(hidden) == 2 * 12 + 2
    assert max(map(abs, hidden.values())) < BOUND, hidden
    assert abs(slopes(use_mup=True, tied=tied, lr=LR_LOGITS)["logits"]) < BOUND


def test_changes_of_a_model_with_biases_and_layernorms_do_not_depend_on_the_width() -> None:
    hidden = slopes(use_mup=True, tied=True, lr=LR, kind="starcoder2")
    hidden.pop("logits")
    assert len(hidden) == 2 * 11 + 2 and max(map(abs, hidden.values())) < BOUND, hidden


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_same_check_sees_the_standard_parametrisation_grow(tied: bool) -> None:
    """P10."""
    found = slopes(use_mup=False, tied=tied, lr=LR)
    matrices = {name: slope for name, slope in found.items() if name.endswith("_proj")}
    assert len(matrices) == 2 * 7 and min(matrices.values()) > 2 * BOUND, matrices
    assert found["logits"] > 2 * BOUND
