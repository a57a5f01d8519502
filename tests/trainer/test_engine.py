"""The engine in one process: steps that must not happen, storage that must not move, eval that must not disturb."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_world import solo_engine, tiny_batch, tiny_config

from trainer.beat import Word
from trainer.checkpoint.state import RunState
from trainer.data.batch import StepBatch
from trainer.device import precision
from trainer.engine import Engine, StepResult
from trainer.errors import ConfigError
from trainer.loop import advance
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.optim.norm import square_sum
from trainer.pipeline.generators import GENERATORS
from trainer.throughput import StepCost


def snapshot(engine: Engine) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in engine.state_shards().values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def step(engine: Engine, batch, t: int = 1, word: int = 0):  # type: ignore[no-untyped-def]
    return engine.train_step(batch, lr=1e-3, weight_decay=0.1, adam_t=t, control_word=word)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_training_one_batch_lowers_its_loss(dtype: str) -> None:
    engine = solo_engine(tiny_config(dtype=dtype))
    losses = [step(engine, tiny_batch(), t).loss for t in range(1, 31)]
    assert losses[0] == pytest.approx(math.log(67), rel=0.02) and losses[-1] < losses[0] - 0.5


def test_bfloat16_keeps_fp32_gradients_master_and_moments() -> None:
    engine = solo_engine(tiny_config(dtype="bfloat16"))
    step(engine, tiny_batch())
    for storage in engine.optimizer.storages:
        assert storage.weights.dtype is torch.bfloat16
        assert {storage.grads.dtype, storage.master.dtype, storage.exp_avg.dtype} == {torch.float32}
        assert torch.equal(storage.master.bfloat16(), storage.weights[storage.held])
        assert (storage.master != storage.weights[storage.held]).any(), "master must keep what bf16 rounds away"


@pytest.mark.parametrize(("m", "tolerance"), [(64, 1e-6), (512, 512 * 2**-24)])
@pytest.mark.parametrize("buffers", ["ours", "bfloat16"])
def test_l9_many_micro_batches_do_not_lose_gradient_to_rounding(
    buffers: str, m: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9 (DeepSpeed#2352): m identical micro-batches give m times the gradient; bf16 buffers fail this test.

    A sum of m equal float32 numbers is off by up to m · 2⁻²⁴ of itself, wherever it is taken.
    """
    if buffers == "bfloat16":
        narrow = replace(precision("bfloat16"), grad=torch.bfloat16)
        monkeypatch.setattr("trainer.engine.precision", lambda name: narrow)
    engine = solo_engine(tiny_config(dtype="bfloat16", tied=False, layers=1))
    one = tiny_batch(m=1, b=1)
    many = replace(
        one, input_ids_MBT=one.input_ids_MBT.expand(m, -1, -1), labels_MBT=one.labels_MBT.expand(m, -1, -1),
        position_ids_MBT=one.position_ids_MBT.expand(m, -1, -1), sample_ids=tuple(range(m)),
    )  # fmt: skip
    engine.backward(one, num_valid=100)
    single = [s.grads.double() for s in engine.optimizer.storages]
    engine.backward(many, num_valid=100)
    errors = [
        float(torch.linalg.vector_norm(storage.grads.double() / m - alone) / torch.linalg.vector_norm(alone))
        for storage, alone in zip(engine.optimizer.storages, single, strict=True)
    ]
    assert max(errors) < tolerance if buffers == "ours" else min(errors) > 100 * tolerance, errors


def test_g8_bias_correction_counts_updates_that_were_made_as_torch_does() -> None:
    """G8: three updates with steps without labels, a skip window and a NaN between them; torch's AdamW makes three."""
    engine = solo_engine(tiny_config(dtype="float64", clip=None))
    names = [spec.name for spec in engine.specs]
    theirs = {name: torch.nn.Parameter(engine.optimizer.view(name)[0].clone()) for name in names}
    groups = [{"params": [theirs[s.name]], "weight_decay": 0.1 * s.wd_mult} for s in engine.specs]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    state = RunState()
    cost = StepCost(
        tokens=1, samples=1, flops=0, flops_full_attn=0, flops_megatron=0, flops_hardware=0, peak_flops_per_s=None
    )
    for kind in ("train", "no label", "train", "window", "no label", "not finite", "train"):
        batch = tiny_batch(state.step)
        if kind == "window":
            state = advance(state, cost, updated=False)
            continue
        if kind == "no label":
            batch.labels_MBT.fill_(-100)
        weight = engine.optimizer.view("model.norm.weight")[0]
        good = weight.clone()
        if kind == "not finite":
            weight[0] = math.nan
        result = engine.train_step(batch, lr=1e-2, weight_decay=0.1, adam_t=state.adam_t + 1)
        assert (result.skipped is None) == (kind == "train")
        if kind == "not finite":
            weight.copy_(good)  # the loop would end here, and resume from a checkpoint with the same count
        if kind == "train":
            for name, parameter in theirs.items():
                parameter.grad = engine.optimizer.view(name)[1].clone()
            adamw.step()
        state = advance(state, cost, updated=result.skipped is None)
    assert (state.step, state.adam_t) == (7, 3)
    for name, parameter in theirs.items():
        torch.testing.assert_close(engine.optimizer.view(name)[0], parameter.detach(), rtol=1e-12, atol=1e-14)


def test_no_valid_label_skips_the_step_and_says_so() -> None:
    """L7."""
    engine = solo_engine(tiny_config())
    before = snapshot(engine)
    batch = tiny_batch()
    result = step(engine, replace(batch, labels_MBT=torch.full_like(batch.labels_MBT, -100)), word=Word.SAVE)
    assert result.num_valid == 0 and result.skipped == "no valid label in the global batch" and result.finite
    assert result.control_word is Word.SAVE and same(before, snapshot(engine))


def test_a_nan_weight_stops_the_update() -> None:
    engine = solo_engine(tiny_config())
    engine.optimizer.view("model.norm.weight")[0][0] = float("nan")
    before = snapshot(engine)
    result = step(engine, tiny_batch())
    assert not result.finite and result.skipped is not None and "not finite" in result.skipped
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(before, snapshot(engine), strict=True))
    assert not any(s.exp_avg.any() for s in engine.optimizer.storages)


def test_a_loss_that_is_not_finite_stops_the_update_though_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = solo_engine(tiny_config())
    before, backward = snapshot(engine), engine.backward
    monkeypatch.setattr(engine, "backward", lambda *args, **named: backward(*args, **named) + math.inf)
    result = step(engine, tiny_batch())
    assert not result.finite and math.isfinite(result.grad_norm) and same(before, snapshot(engine))


def test_every_real_element_moves_and_gaps_stay_zero() -> None:
    """G5."""
    engine = solo_engine(tiny_config(dtype="float64"))
    before = [s.weights.clone() for s in engine.optimizer.storages]
    step(engine, tiny_batch())
    for storage, old in zip(engine.optimizer.storages, before, strict=True):
        is_real = torch.zeros(storage.bucket.numel, dtype=torch.bool)
        for slot in storage.bucket.slots:
            is_real[slot.start : slot.stop] = True
        assert (storage.weights != old)[is_real].all(), "weight decay alone moves every decayed element"
        assert not storage.weights[~is_real].any() and not storage.exp_avg[~is_real].any()


def test_eval_disturbs_nothing_and_repeats_itself() -> None:
    straight, evaluated = solo_engine(tiny_config()), solo_engine(tiny_config())
    for t in range(1, 4):
        first = evaluated.eval_loss(tiny_batch(9))
        assert first == evaluated.eval_loss(tiny_batch(9))
        assert step(straight, tiny_batch(t), t) == step(evaluated, tiny_batch(t), t)
    assert same(snapshot(straight), snapshot(evaluated))


def test_eval_is_the_sum_of_what_training_reports_as_a_mean() -> None:
    engine = solo_engine(tiny_config(dtype="float64"))
    loss_sum, num_valid = engine.eval_loss(tiny_batch())
    result = step(engine, tiny_batch())
    assert num_valid == result.num_valid and loss_sum / num_valid == pytest.approx(result.loss, rel=1e-12)


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_stages_of_one_rank_change_no_bit(tied: bool, dtype: str) -> None:
    """Handed over as a detached leaf, weight gradients at once or late: losses, norms, weights, eval are the same."""

    def run(**mesh: Any) -> tuple[list[StepResult], tuple[float, int], list[torch.Tensor]]:
        engine = solo_engine(tiny_config(tied=tied, dtype=dtype, layers=4, **mesh))
        results = [step(engine, tiny_batch(t, m=5), t) for t in (1, 2)]
        names = [slot.name for bucket in engine.layout.buckets for slot in bucket.slots]
        return results, engine.eval_loss(tiny_batch(9, m=3)), [engine.optimizer.view(name)[0] for name in sorted(names)]

    results, validation, weights = run()
    meshes: list[dict[str, Any]] = [{"pp_engine": name} for name in GENERATORS]
    meshes += [{"pp_engine": "interleaved", "virtual_stages": 4}]
    meshes += [{"pp_engine": "afab", "virtual_stages": 3, "layers_per_stage": [0, 3, 1]}]
    for mesh in meshes:
        others = run(**mesh)
        assert others[:2] == (results, validation), mesh
        assert same(others[2], weights), mesh


def test_splitting_the_batch_into_micro_batches_changes_nothing() -> None:
    """L1, P3: unequal valid labels per micro-batch: a mean of means would differ."""
    whole, split = (solo_engine(tiny_config(dtype="float64")) for _ in range(2))
    batch = tiny_batch(m=1, b=4)
    halves = replace(
        batch, input_ids_MBT=batch.input_ids_MBT.view(4, 1, -1), labels_MBT=batch.labels_MBT.view(4, 1, -1),
        position_ids_MBT=batch.position_ids_MBT.reshape(4, 1, -1),
    )  # fmt: skip
    a, b = step(whole, batch), step(split, halves)
    assert a.loss == pytest.approx(b.loss, rel=1e-13) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-12)


def test_steps_of_other_shapes_in_between_leave_no_trace() -> None:
    """L8: more or smaller micro-batches make another plan; a batch has the same gradients, to the bit, after them."""
    engine, batch = solo_engine(tiny_config()), tiny_batch(m=3, b=2)

    def gradients(of: StepBatch) -> list[torch.Tensor]:
        engine.backward(of, num_valid=of.num_valid)
        return [storage.grads.clone() for storage in engine.optimizer.storages]

    first = gradients(batch)
    others = [gradients(tiny_batch(1, m=m, b=b)) for m, b in ((2, 1), (1, 4), (3, 1))]
    assert not any(same(first, other) for other in others)
    assert same(first, gradients(batch)), "all three micro-batches are in it, and nothing of another step"


def test_a_gradient_that_left_its_bucket_is_noticed() -> None:
    engine = solo_engine(tiny_config())
    _, parameter, _ = engine._parameters[0]
    parameter.grad = parameter.grad.clone() if parameter.grad is not None else None
    with pytest.raises(AssertionError, match=r"left its bucket"):
        step(engine, tiny_batch())


def test_control_word_and_sync_after_a_load() -> None:
    engine = solo_engine(tiny_config(dtype="bfloat16"))
    assert step(engine, tiny_batch(), word=Word.DRAIN).control_word is Word.DRAIN
    for (state, _), shard in engine.state_shards().items():
        if state == "master":
            shard.fill_(0.5)
    engine.sync_params_from_master()
    assert all((parameter == 0.5).all() for _, parameter, _ in engine._parameters)


def test_local_tie_sites_share_weights_but_not_gradients() -> None:
    """W4, W2 (both sites on one rank)."""
    engine = solo_engine(tiny_config(tied=True))
    live = {name: parameter for name, parameter, _ in engine._parameters}
    head, embedding = live["lm_head.weight"], live["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr() and head.grad.data_ptr() != embedding.grad.data_ptr()
    step(engine, tiny_batch())
    assert torch.equal(head, embedding)


def test_zero_stages_beyond_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage is 2; set 0 or 1"):
        Engine(tiny_config(zero_stage=2), ParallelContext(Topology(), device=torch.device("cpu")))


def test_norm_is_exact_beyond_fp32() -> None:
    x = torch.full((300_000,), 1e-3)
    x[0] = 1e3
    assert square_sum(x).item() == pytest.approx(x.double().square().sum().item(), rel=1e-12)
