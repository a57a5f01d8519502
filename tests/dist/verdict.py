"""Whether a case computed what one process computes: loss and gradient norm of every step, all gradients of the first,
all weights at the end, the loss of a further batch; replicas and tied copies bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
import reference
import torch
from dist.assemble import Assembled, assemble
from dist.axes import DECAY, SEED, Case, config_of
from dist.case import QUICK_STEPS, RankRun, global_batch, lr_at, run_case
from dist.pool import Pool
from numpy.typing import ArrayLike
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from trainer.config.architecture import ModelConfig
from trainer.config.model import Config, Parallelism
from trainer.init import draw_box
from trainer.mesh.topology import Topology
from trainer.spec import Box, param_specs

SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings", "sliding_window"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("rms_norm_eps", "norm_epsilon", "attention_bias", "mlp_bias", "use_bias"),
)
"""What transformers' config must be told; the names are the same there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Largest relative error allowed: |ours − theirs| / |theirs| in the norm of `order`.

    `first_loss`, `first_norm`: of the first step; `loss`, `norm`: of all steps. In low precision weights are compared
    by how far they moved, and in order 2: single elements go astray, as Adam moves by ±lr on a gradient of pure
    rounding noise.
    """

    order: float
    first_loss: float
    first_norm: float
    loss: float
    norm: float
    gradient: float
    weight: float


BARS = {
    "float64": Bars(
        order=np.inf,
        first_loss=1e-10,
        first_norm=1e-10,
        loss=1e-10,
        norm=1e-10,
        gradient=1e-10,
        weight=1e-10,
    ),
    "float32": Bars(order=2, first_loss=1e-6, first_norm=1e-6, loss=1e-4, norm=1e-4, gradient=1e-5, weight=1e-2),
}
SUMS_TO = 1e-12
"""The same squares in fp64, added in another order."""
LOSES_AT_MOST = 3.0
"""In bf16: our errors over those of transformers' own bf16 run, both against fp64. Two sound runs round differently, so
that neither is the other's reference."""
LAST_PLACE = 2.0**-9
"""Half a unit in bf16's last place: a loss can be nearer than that by luck. A gradient's norm can be nearer than the
gradient, so it is held to what the gradient loses as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`max_rel_err`: the largest error of anything compared. `faults`: what is wrong, in words; () is right."""

    max_rel_err: float
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference run, its weights before it, and its Σ loss over the batch after the last step with their number.

    `bars`: how near a run of the case's dtype has to come.
    """

    outcome: reference.Outcome
    start: dict[str, torch.Tensor]
    after: tuple[float, int]
    bars: Bars


def judge(pool: Pool, case: Case, steps: int) -> Verdict:
    """Run the case and compare it with its reference run. In bf16 for few steps: two roundings drift apart in more."""
    if case["dtype"] not in BARS:
        steps = min(steps, QUICK_STEPS)
    return compare(case, pool.run(case.topology, run_case, case, steps), expected(case, steps))


def compare(case: Case, runs: Sequence[RankRun], known: Reference) -> Verdict:
    """What the ranks saw against the reference run of the same samples. Pure."""
    ours = assemble(case, runs)
    errors = list(_errors(case, runs[0], ours, known))
    wrong = [f"{what}: relative error {error:.2e}, allowed {bar:.0e}" for what, error, bar in errors if not error < bar]
    return Verdict(
        max_rel_err=max(error for _, error, _ in errors),
        faults=(*ours.faults, *_missing(case, runs[0], ours, known), *wrong),
    )


def _errors(case: Case, run: RankRun, ours: Assembled, known: Reference) -> Iterator[tuple[str, float, float]]:
    """(what, relative error, the bar it must be under)."""
    bars, theirs = known.bars, known.outcome
    losses, norms = [s.loss for s in run.steps], [s.grad_norm for s in run.steps]
    yield "loss of the first step", relative(losses[0], theirs.losses[0]), bars.first_loss
    yield "gradient norm of the first step", relative(norms[0], theirs.grad_norms[0]), bars.first_norm
    blocks = run.steps[0].grad_norms or {}
    error = relative(list(blocks.values()), list(by_block(theirs.gradients).values()), bars.order)
    yield "gradient norms by block of the first step", error, bars.gradient
    yield "their squares' sum", relative(sum(norm**2 for norm in blocks.values()), norms[0] ** 2), SUMS_TO
    yield "loss", relative(losses, theirs.losses), bars.loss
    yield "gradient norm", relative(norms, theirs.grad_norms), bars.norm
    yield "validation loss", relative(run.validation[0], known.after[0]), bars.loss
    for (name, stage), value in ours.gradients.items():
        yield f"gradient of {name} on stage {stage}", relative(value, theirs.gradients[name], bars.order), bars.gradient
    for (name, stage), value in ours.masters.items():
        start = 0.0 if bars.order == np.inf else known.start[name].numpy()
        error = relative(value - start, theirs.weights[name].numpy() - start, bars.order)
        yield f"weight {name} on stage {stage}", error, bars.weight


def by_block(gradients: dict[str, torch.Tensor]) -> dict[str, float]:
    """The norm of each block's gradients, in the order of the parameters."""
    squares: dict[str, float] = {}
    for name in gradients:
        block = name.split(".self_attn.")[0].split(".mlp.")[0].split(".input_layernorm.")[0]
        block = block.split(".post_attention_layernorm.")[0].removesuffix(".weight").removesuffix(".bias")
        squares[block] = squares.get(block, 0.0) + float(gradients[name].double().square().sum())
    return {block: square**0.5 for block, square in squares.items()}


def _missing(case: Case, run: RankRun, ours: Assembled, known: Reference) -> Iterator[str]:
    """What would make the comparison vacuous."""
    for what, whole in (("gradients", ours.gradients), ("weights", ours.masters)):
        if {name for name, _ in whole} != set(known.outcome.weights):
            yield f"the {what} are not those of the reference's tensors"
    if run.validation[1] != known.after[1]:
        yield f"validation counted {run.validation[1]} labels, not {known.after[1]}"
    clip = config_of(case).optimizer.clip_grad
    clipped = 0 if clip is None else sum(norm > clip for norm in known.outcome.grad_norms)
    if clip is not None and not (2 * clipped > len(known.outcome.grad_norms) if clip < 1 else clipped == 0):
        meant = "bite in most steps" if clip < 1 else "leave alone"
        yield f"clip_grad = {clip} is meant to {meant}, the norms are {known.outcome.grad_norms}"


def relative(ours: ArrayLike, theirs: ArrayLike, order: float = np.inf) -> float:
    """|ours − theirs| / |theirs| over all elements; NaN where ours holds one."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (ours, theirs))
    assert a.shape == b.shape, f"shape {a.shape} is not {b.shape}"
    size = float(np.linalg.norm(b.ravel(), order))
    return float(np.linalg.norm((a - b).ravel(), order)) / max(size, 1e-30)


def expected(case: Case, steps: int) -> Reference:
    """The reference run of the case's model on its samples; cases that differ in layout alone share it."""
    config = config_of(case)
    tokens = config.tokens.model_copy(
        update={"micro_batch_size": config.global_batch_size, "batch_accumulation_per_replica": 1}
    )
    alone = {
        "parallelism": Parallelism(dp=1, pp=1, tp=1),
        "tokens": tokens,
        "model": replace(config.model, dtype="float64", recompute="none", recompute_interval=1, compile="none"),
        "optimizer": config.optimizer.model_copy(update={"zero_stage": 1}),
    }
    text = config.model_copy(update=alone).model_dump_json()
    exact = _train(text, steps, "float64")
    bars = BARS[case["dtype"]] if case["dtype"] in BARS else _bars(_train(text, steps, case["dtype"]), exact)
    return replace(exact, bars=bars)


def _bars(narrow: Reference, exact: Reference) -> Bars:
    """What a run as narrow as `narrow` may lose, from what `narrow` loses itself."""
    ours, theirs = narrow.outcome, exact.outcome
    loss = max(relative(ours.losses, theirs.losses), relative(narrow.after[0], exact.after[0]), LAST_PLACE)
    whole = relative(*(torch.cat([g.flatten() for g in of.gradients.values()]) for of in (ours, theirs)), 2)
    gradient = max(relative(ours.gradients[name], value, 2) for name, value in theirs.gradients.items())
    weight = max(relative(ours.weights[n] - exact.start[n], w - exact.start[n], 2) for n, w in theirs.weights.items())
    return Bars(
        order=2,
        first_loss=LOSES_AT_MOST * max(relative(ours.losses[0], theirs.losses[0]), LAST_PLACE),
        first_norm=LOSES_AT_MOST * max(relative(ours.grad_norms[0], theirs.grad_norms[0]), whole),
        loss=LOSES_AT_MOST * loss,
        norm=LOSES_AT_MOST * max(relative(ours.grad_norms, theirs.grad_norms), whole),
        gradient=LOSES_AT_MOST * gradient,
        weight=LOSES_AT_MOST * weight,
    )


def hf_config(shape: ModelConfig) -> PretrainedConfig:
    """The architecture as transformers is told of it."""
    keys = {name: getattr(shape, name) for name in SHAPE_KEYS}
    flags = {"no_rope_layers": [int(on) for on in shape.rope_layers]} if shape.model_type == "smollm3" else {}
    rope = shape.rope.model_dump(exclude_none=True)
    return AutoConfig.for_model(
        shape.model_type, **keys, **flags, hidden_act=shape.activation, rope_parameters=rope
    )  # fmt: skip


@cache
def _train(config_json: str, steps: int, dtype: str) -> Reference:
    """A reference run computed in `dtype`."""
    config = Config.model_validate_json(config_json)
    shape, samples = config.model.model_config, config.global_batch_size
    start = {
        spec.name: torch.from_numpy(draw_box(spec, Box((0,) * len(spec.shape), spec.shape), seed=SEED)).double()
        for spec in param_specs(config, Topology())
    }
    compute: torch.dtype = getattr(torch, dtype)
    is_narrow = compute.itemsize < 4
    rounded = {name: weight.to(compute) for name, weight in start.items()}
    model = reference.build(hf_config(shape), rounded, compute)
    is_mup = config.model.init_method.use_mup
    if is_mup:
        reference.apply_mup(model)
    rates, decays = reference.mup_rates(model) if is_mup else {}, {}
    for name in start:
        group = next((g for g in config.optimizer.groups if fnmatchcase(name, g.match)), None)
        if group is not None:
            rates[name] = rates.get(name, 1.0) * group.lr_mult
            decays[name] = group.weight_decay_mult
    if config.tokens.document_masks:
        reference.mask_documents(model)
    factory = config.optimizer.optimizer_factory
    outcome = reference.train(
        model, [global_batch(samples, shape.vocab_size, i) for i in range(steps)],
        lr=[lr_at(i, config) for i in range(steps)],
        betas=(factory.adam_beta1, factory.adam_beta2), eps=factory.adam_eps, weight_decay=DECAY,
        clip_grad=config.optimizer.clip_grad, lr_mult=rates, z_loss=config.optimizer.z_loss_coefficient,
        label_smoothing=config.optimizer.label_smoothing, decay_mult=decays,
        masters={name: nn.Parameter(weight.float()) for name, weight in start.items()} if is_narrow else None,
    )  # fmt: skip
    ids, labels = global_batch(samples, shape.vocab_size, steps)
    with torch.no_grad():
        after = float(reference.cross_entropy_sum(reference.at_least_fp32(model(input_ids=ids).logits), labels))
    return Reference(
        outcome=outcome, start=start, after=(after, int((labels != -100).sum())), bars=BARS["float64"],
    )  # fmt: skip
