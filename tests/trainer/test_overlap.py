"""When which bucket may be reduced: order and completeness, without ranks; and that the engine asks in time."""

from collections.abc import Iterable

import pytest
import torch
from engine_world import solo_engine, tiny_batch, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.optim.overlap import InOrder, Site, reduction_order
from trainer.pipeline.generators import GENERATORS, make_schedule
from trainer.pipeline.schedule import Op, last_gradients

SCHEDULES = [(name, p, m) for name in GENERATORS for p in (1, 2, 4) for m in (4, 5, 8)]


@pytest.mark.parametrize(("name", "p", "m"), SCHEDULES)
def test_after_the_last_gradients_no_action_adds_any(name: str, p: int, m: int) -> None:
    for actions in make_schedule(name, p=p, m=m).lists:
        last = last_gradients(actions)
        stages = {action.stage for action in actions}
        assert set(last.matrices) == set(last.others) == stages
        for stage in stages:
            own = [(index, a) for index, a in enumerate(actions) if a.stage == stage]
            assert last.others[stage] == max(index for index, a in own if a.op in (Op.B, Op.I))
            assert last.matrices[stage] == max(index for index, a in own if a.op in (Op.B, Op.W))
            assert last.others[stage] <= last.matrices[stage]


@pytest.mark.parametrize("name", GENERATORS)
def test_buckets_are_reduced_in_the_order_in_which_stages_end_and_ties_last(name: str) -> None:
    actions = make_schedule(name, p=2, m=4).lists[0]
    last = last_gradients(actions)
    stages = sorted(last.matrices, key=lambda stage: last.matrices[stage])
    buckets = [[Site(stage=stages[0], is_matrix=True), Site(stage=None, is_matrix=False)]]
    buckets += [[Site(stage=stage, is_matrix=True)] for stage in stages]
    buckets += [[Site(stage=stage, is_matrix=False) for stage in stages]]
    order = reduction_order(buckets, actions)
    assert sorted(order) == list(range(len(buckets))) and order[-1] == 0
    matrices = [at for at in order if at in range(1, len(stages) + 1)]
    assert matrices == sorted(matrices)
    assert reduction_order(buckets, actions) == order


@given(
    missing=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_bucket_starts_once_in_order_and_never_before_it_is_complete(
    missing: list[int], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(missing))))
    events = data.draw(st.permutations([b for b, count in enumerate(missing) for _ in range(count)]))
    held = data.draw(st.sets(st.sampled_from(range(len(missing)))))
    started: list[int] = []
    left = dict(enumerate(missing))

    def start(bucket: int) -> None:
        assert left[bucket] == 0
        started.append(bucket)

    launches = InOrder(order, left, start)
    for event in events:
        left[event] -= 1
        launches.arrived(event)
        launches.start_complete(lambda bucket: bucket not in held)
        assert started == order[: len(started)] and not set(started) & held
    launches.start_complete()
    assert started == order, "all that is complete has started"
    launches.start_all()
    assert started == order


def test_what_took_no_part_in_a_step_is_started_at_its_end() -> None:
    started: list[int] = []
    launches = InOrder((1, 0, 2), {0: 0, 1: 1, 2: 5}, started.append)
    launches.start_complete()
    assert started == []
    launches.start_all()
    assert started == [1, 0, 2]


@pytest.mark.parametrize("pp_engine", GENERATORS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_bucket_starts_when_its_gradients_are_those_of_the_whole_step(pp_engine: str, tied: bool) -> None:
    """The values at the start of each reduction are the final ones, and all but the tie's start during backward."""
    engine = solo_engine(tiny_config(layers=4, tied=tied, pp_engine=pp_engine))
    at_start: dict[int, torch.Tensor] = {}
    start = engine.optimizer.start_reduction

    def spy(index: int) -> None:
        at_start[index] = engine.optimizer.storages[index].grads.clone()
        start(index)

    engine.watch._start = spy
    end, early = engine.watch.end, []
    engine.watch.end = lambda: (early.extend(at_start), end())[1]  # type: ignore[method-assign, func-returns-value]
    for seed in range(2):
        at_start.clear(), early.clear()
        engine.backward(tiny_batch(seed, m=5), num_valid=10)
        assert sorted(at_start) == list(range(len(engine.layout.buckets)))
        for index, value in at_start.items():
            assert torch.equal(value, engine.optimizer.storages[index].grads)
        with_tie = {engine.layout.find("model.embed_tokens.weight")[0].index} if tied else set()
        assert set(at_start) - set(early) <= with_tie
        engine.optimizer.reduce_gradients()


def test_a_block_waits_for_its_own_weights_before_it_runs() -> None:
    engine = solo_engine(tiny_config(layers=4))
    waited: set[int] = set()
    of_block: dict[str, set[int]] = {}
    for name, _, _ in engine._parameters:
        block = next(block for block in engine._modules if name.startswith(f"{block}."))
        canonical = "model.embed_tokens.weight" if name == "lm_head.weight" else name
        of_block.setdefault(block, set()).add(engine.layout.find(canonical)[0].index)

    def wait(buckets: Iterable[int]) -> None:
        waited.update(buckets)

    engine.watch._wait_weights = wait
    for block, module in engine._modules.items():
        module.register_forward_pre_hook(lambda *_, block=block: _check(of_block[block], waited))
    engine.eval_loss(tiny_batch())
    assert waited == set(range(len(engine.layout.buckets)))


def _check(needed: set[int], waited: set[int]) -> None:
    assert needed <= waited
