"""Every layout computes what one process computes: fp64, 1e-10, against transformers and torch's AdamW."""

import fnmatch
import itertools
from functools import cache

import numpy as np
import pytest
import reference
import torch
from dist.case import CLIP, DECAY, LR, STEPS, Case, RankRun, global_batch, make_config, run_case
from dist.pool import Pool
from transformers import AutoConfig

from trainer.init import draw_box
from trainer.mesh.topology import Topology
from trainer.spec import Box, ParamSpec, local_box, local_shape, param_specs

TOLERANCE = 1e-10

# Each pattern takes some of what a later one fits; several groups on every stage.
GROUPS = (
    ("model.layers.1.*norm*", 2.0, 0.5), ("*norm*", 0.0, 3.0), ("*.0.mlp.*", 0.5, 0.25), ("*_proj*", 3.0, 1.0),
    ("*embed*", 0.0, 1.5),
)  # fmt: skip


def matrix() -> list[Case]:
    """dp, pp, tp ∈ {1, 2} and all products; ZeRO stages where dp = 2, schedules where pp = 2; tied and untied."""
    return [
        Case(dp=dp, pp=pp, tp=tp, tied=tied, zero_stage=zero, schedule=schedule)
        for dp, pp, tp, tied in itertools.product((1, 2), (1, 2), (1, 2), (True, False))
        for zero in ((0, 1) if dp == 2 else (1,))
        for schedule in (("1f1b", "afab") if pp == 2 else ("1f1b",))
    ]


WIDE = [
    Case(pp=4, tied=True, layers=4),
    Case(tp=4, kv_heads=4, tied=False),
    Case(dp=8, tied=True, bucket_numel=1000),
    Case(pp=4, tp=2, tied=True, layers=4, schedule="afab"),
    Case(dp=2, tp=2, tied=False, use_mup=True),
    Case(pp=2, tied=True, layers=5, schedule="interleaved"),
    Case(pp=2, tp=2, tied=False, layers=6, schedule="interleaved", virtual_stages=3),
    Case(pp=4, tied=True, layers=8, schedule="interleaved", layers_per_stage=(0, 1, 2, 1, 1, 1, 1, 1)),
    Case(dp=2, pp=2, tied=True, layers=4, schedule="zb-h1"),
    Case(pp=4, tp=2, tied=False, layers=4, schedule="zb-h1"),
    Case(dp=2, pp=2, tied=True, layers=4, schedule="zb-v"),
    Case(pp=2, tied=True, layers=4, schedule="afab", virtual_stages=2),
    Case(tied=True, layers=4, schedule="interleaved", virtual_stages=2),
    Case(pp=2, tp=2, tied=True, use_mup=True),
    Case(dp=2, pp=2, tp=2, tied=True, groups=GROUPS, bucket_numel=1000),
    Case(dp=4, tied=False, groups=GROUPS, zero_stage=0),
    Case(dp=2, pp=2, tp=2, tied=True, layers=4, recompute="full", recompute_interval=3),
    Case(pp=2, tp=2, tied=False, layers=4, schedule="zb-h1", recompute="selective", sequence_parallel=True),
]

SEQUENCE = [
    Case(tp=2, tied=True, sequence_parallel=True),
    Case(tp=2, tied=False, sequence_parallel=True),
    Case(tp=4, kv_heads=4, tied=True, sequence_parallel=True),
    Case(dp=2, pp=2, tp=2, tied=True, bucket_numel=300, zero_stage=0, sequence_parallel=True),
    Case(pp=2, tp=2, tied=False, layers=4, schedule="zb-v", sequence_parallel=True),
    Case(pp=2, tp=4, kv_heads=4, layers=5, schedule="interleaved", use_mup=True, sequence_parallel=True),
]

DOCUMENTS = [
    Case(tied=False, document_masks=True),
    Case(dp=2, pp=2, tp=2, tied=True, document_masks=True, recompute="full", sequence_parallel=True),
    Case(pp=4, tied=True, layers=4, schedule="zb-h1", document_masks=True, recompute="selective"),
    Case(pp=2, tied=True, layers=3, schedule="interleaved", layers_per_stage=(0, 1, 2, 0), document_masks=True),
]


def specs_of(case: Case, topology: Topology | None = None) -> tuple[ParamSpec, ...]:
    return param_specs(make_config(case), topology or Topology())


def without_layout(case: Case) -> Case:
    """The case's model and training on one process: what the reference run depends on."""
    names = "tied layers heads kv_heads use_mup groups model_type attention_bias mlp_bias z_loss label_smoothing "
    names += "document_masks"
    return Case(**{name: getattr(case, name) for name in names.split()})


@cache
def expected(case: Case) -> tuple[reference.Outcome, float]:
    """The reference run, and its Σ loss over the batch after the last step."""
    shape = make_config(case).model.model_config
    biases = {"attention_bias": shape.attention_bias, "mlp_bias": shape.mlp_bias}
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers, head_dim=shape.head_dim,
        num_attention_heads=shape.num_attention_heads, num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=shape.tie_word_embeddings, rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, **biases,
    )  # fmt: skip
    tensors = {
        spec.name: torch.from_numpy(draw_box(spec, Box((0,) * len(spec.shape), spec.shape), seed=7)).double()
        for spec in specs_of(case)
    }
    model = reference.build(config, tensors, torch.float64)
    if case.use_mup:
        reference.apply_mup(model)
    if case.document_masks:
        reference.mask_documents(model)
    lr_mult = {name: mup_factor(name, t.shape) for name, t in tensors.items()} if case.use_mup else {}
    wd_mult = {}
    for match, wd, lr in reversed(case.groups):
        for name in fnmatch.filter(tensors, match):
            wd_mult[name], lr_mult[name] = wd, lr
    outcome = reference.train(
        model, [global_batch(i) for i in range(STEPS)], lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY,
        clip_grad=CLIP, lr_mult=lr_mult, wd_mult=wd_mult, z_loss=case.z_loss, label_smoothing=case.label_smoothing,
    )  # fmt: skip
    ids, labels = global_batch(STEPS)
    with torch.no_grad():
        logits = model(input_ids=ids).logits.flatten(0, 1)
    after = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return outcome, float(after)


def mup_factor(name: str, shape: torch.Size) -> float:
    """Spectral muP's factor on Adam's rate: base width / fan in for matrices, 1 for embeddings and norms."""
    return 256 / shape[1] if name.endswith(("proj.weight", "lm_head.weight")) else 1.0


def assemble_gradients(case: Case, runs: list[RankRun]) -> dict[tuple[str, int], np.ndarray]:
    """(canonical name, stage) → whole gradient, from every rank's dp shard."""
    topology = case.topology
    specs = {spec.name: spec for spec in specs_of(case, topology)}
    local: dict[tuple[str, int, int], np.ndarray] = {}
    for rank, run in enumerate(runs):
        at = topology.coord(rank)
        for name, start, values in run.gradients:
            shape = local_shape(specs[name], case.tp, at.tp)
            target = local.setdefault((name, at.pp, at.tp), np.full(int(np.prod(shape)), np.nan))
            target[start : start + len(values)] = values
    return join_tp(specs, local, case.tp)


def assemble_weights(case: Case, runs: list[RankRun]) -> dict[tuple[str, int], np.ndarray]:
    """(canonical name, stage) → whole weight; dp replicas are asserted to be bitwise equal on the way."""
    topology = case.topology
    local: dict[tuple[str, int, int], np.ndarray] = {}
    for rank, run in enumerate(runs):
        at = topology.coord(rank)
        for name, values in run.weights.items():
            known = local.setdefault((name, at.pp, at.tp), values)
            assert np.array_equal(known, values), f"{name} differs between dp replicas"
    return join_tp({spec.name: spec for spec in specs_of(case, topology)}, local, case.tp)


def join_tp(
    specs: dict[str, ParamSpec], local: dict[tuple[str, int, int], np.ndarray], tp: int
) -> dict[tuple[str, int], np.ndarray]:
    whole: dict[tuple[str, int], np.ndarray] = {}
    for (name, stage, tp_rank), values in local.items():
        spec = specs[name]
        box = local_box(spec, tp, tp_rank)
        part = values.reshape(local_shape(spec, tp, tp_rank))[tuple(slice(n) for n in box.size)]
        target = whole.setdefault((name, stage), np.full(spec.shape, np.nan))
        where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        if spec.shard_dim is None and not np.isnan(target).all():
            assert np.array_equal(target, part), f"{name} differs between tp replicas"
        target[where] = part
    return whole


def close(ours: object, theirs: object) -> float:
    """Largest difference relative to the reference's largest value."""
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape and not np.isnan(a).any()
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def check(pool: Pool, case: Case) -> None:
    runs: list[RankRun] = pool.run(case.topology, run_case, case)
    outcome, after = expected(without_layout(case))
    assert all(run.steps == runs[0].steps and run.validation == runs[0].validation for run in runs)
    assert close([s.loss for s in runs[0].steps], outcome.losses) < TOLERANCE
    assert close([s.grad_norm for s in runs[0].steps], outcome.grad_norms) < TOLERANCE
    assert min(outcome.grad_norms) > CLIP, "clipping must bite, or it is not tested"
    assert close(runs[0].validation[0], after) < TOLERANCE
    assert runs[0].validation[1] == int((global_batch(STEPS)[1] != -100).sum())
    gradients, weights = assemble_gradients(case, runs), assemble_weights(case, runs)
    assert {name for name, _ in gradients} == set(outcome.gradients)
    for (name, stage), value in gradients.items():
        assert close(value, outcome.gradients[name]) < TOLERANCE, f"gradient of {name} on stage {stage}"
    for (name, stage), value in weights.items():
        assert close(value, outcome.weights[name]) < TOLERANCE, f"weight {name} on stage {stage}"
    copies = [value for (name, _), value in weights.items() if name == "model.embed_tokens.weight"]
    assert len(copies) == len(specs_of(case, case.topology)[0].pp_ranks)
    assert all(np.array_equal(copies[0], copy) for copy in copies), "tied copies must stay bitwise equal"


@pytest.mark.parametrize("case", matrix(), ids=str)
def test_layout_equals_one_process(pool: Pool, case: Case) -> None:
    check(pool, case)


@pytest.mark.parametrize("case", DOCUMENTS, ids=str)
def test_document_masks_equal_one_process(pool: Pool, case: Case) -> None:
    """C3: each stage makes the mask from its own batch, whatever it recomputes."""
    check(pool, case)


@pytest.mark.parametrize("case", SEQUENCE, ids=str)
def test_sequence_parallel_equals_one_process(pool: Pool, case: Case) -> None:
    """T1, T8: norm gradients are summed over tp, and stay equal on all its ranks."""
    check(pool, case)


MODELS = [
    Case(tied=False, attention_bias=True, mlp_bias=True),
    Case(dp=2, tp=2, tied=True, attention_bias=True, mlp_bias=True, zero_stage=0, use_mup=True),
    Case(pp=2, tp=2, attention_bias=True, mlp_bias=True, layers=4, schedule="zb-h1", sequence_parallel=True),
    Case(tp=2, tied=True, model_type="qwen2"),
    Case(pp=2, tp=2, tied=False, model_type="qwen2", sequence_parallel=True),
    Case(model_type="qwen3", use_mup=True),
    Case(dp=2, tp=2, tied=True, model_type="qwen3", attention_bias=True),
    Case(tp=4, kv_heads=4, tied=False, model_type="qwen3", bucket_numel=300),
    Case(pp=2, tp=2, tied=True, layers=4, model_type="qwen3", schedule="zb-v", sequence_parallel=True),
]

OBJECTIVES = [
    Case(tied=False, z_loss=0.01, label_smoothing=0.1),
    Case(dp=2, tp=2, tied=True, z_loss=0.01),
    Case(pp=2, tp=2, tied=True, label_smoothing=0.1, sequence_parallel=True),
]


@pytest.mark.parametrize("case", OBJECTIVES, ids=str)
def test_each_objective_equals_one_process(pool: Pool, case: Case) -> None:
    """Gradients are those of the whole objective, losses those of the cross-entropy alone, before and after."""
    check(pool, case)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_each_kind_of_model_equals_one_process(pool: Pool, case: Case) -> None:
    """T2, T7: head norms and row biases are one tensor for all tp ranks, with the whole gradient."""
    check(pool, case)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_axis_equals_one_process(pool: Pool, case: Case) -> None:
    check(pool, case)


def test_matrix_is_what_it_says() -> None:
    assert len({str(case) for case in matrix()}) == 36
