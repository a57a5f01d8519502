"""Which nodes train: the planned ones wherever they can, whoever reports first; spares for the missing and the bad."""

import orch_worlds as w
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.decide.decide import decide_cycle
from orchestrator.decide.decision import Action
from orchestrator.decide.observation import CycleObservation, NodeObservation, Stage
from orchestrator.decide.policy import Policy
from orchestrator.state.history import History

POLICY = Policy(beat_interval_s=1.0, start_limit_s=300.0)
quick = settings(max_examples=60, deadline=None)


def arriving(name: str, at: float | None, now: float, **more: object) -> NodeObservation:
    """A node whose agent is heard from `at` on; None: it never comes."""
    here = at is not None and at <= now
    values: dict[str, object] = {"connected": here, "silence_s": 0.1 if here else None, "ready": True if here else None}
    return NodeObservation(name=name, **(values | more))  # type: ignore[arg-type]


def first_start(arrivals: list[float | None], *, num_nodes: int, policy: Policy = POLICY) -> tuple[float, object]:
    """(when, the decision) by which looks every five seconds begin the first cycle or give the allocation up."""
    now = 0.0
    while True:
        nodes = tuple(arriving(f"node{i}", at, now) for i, at in enumerate(arrivals))
        seen = CycleObservation(
            epoch=w.EPOCH, stage=Stage.IDLE, stage_s=now, now_unix=w.NOW + now, num_nodes=num_nodes, train_steps=9,
            nodes=nodes,
        )  # fmt: skip
        decision = decide_cycle(seen, History(), policy)
        if decision.action is not Action.WAIT:
            return now, decision
        now += 5.0
        assert now < 2000, f"nothing comes of it: {decision}"


arrivals_seen = st.lists(st.none() | st.integers(0, 400).map(float), min_size=3, max_size=6)


@quick
@given(arrivals_seen, st.data())
def test_the_planned_nodes_train_in_any_order_of_arrival_that_is_not_absurdly_late(arrivals, data) -> None:
    num_nodes = data.draw(st.integers(1, len(arrivals)))
    when, decision = first_start(arrivals, num_nodes=num_nodes)
    patience = POLICY.spare_wait_s
    assert when <= POLICY.start_limit_s + 5
    in_time = [at is not None and at <= patience for at in arrivals]
    if decision.action is Action.START:
        assert len(set(decision.nodes)) == num_nodes
        kept = [f"node{i}" for i in range(num_nodes) if in_time[i]]
        assert [name for name in decision.nodes if name in kept] == kept
        for place, name in enumerate(decision.nodes):
            assert name == f"node{place}" or not in_time[place], "a spare trains in the place of a node that came"
    else:
        assert sum(at is not None and at <= POLICY.start_limit_s for at in arrivals) < num_nodes
    if all(in_time[:num_nodes]):
        assert decision.nodes == tuple(f"node{i}" for i in range(num_nodes))
        assert when <= max(at for at in arrivals[:num_nodes] if at is not None) + 5, "nobody waits for a spare"


def test_a_node_that_never_comes_is_replaced_after_the_wait_and_a_bad_one_at_once() -> None:
    assert first_start([0.0, None, 0.0], num_nodes=2)[0] == POLICY.spare_wait_s + 5
    for defect in ({"ready": False, "defect": "no GPU"}, {"lost": "its agent ended by signal 9"}):
        nodes = (arriving("node0", 0, 0), arriving("node1", 0, 0, **defect), arriving("node2", 0, 0))
        seen = w.cycle(*nodes, stage=Stage.IDLE, stage_s=0.5)
        assert decide_cycle(seen, History(), POLICY).nodes == ("node0", "node2")


def test_the_wait_is_part_of_the_start_limit_whatever_that_is() -> None:
    for limit_s in (0.5, 5.0, 300.0, 3600.0):
        policy = Policy(beat_interval_s=1.0, start_limit_s=limit_s)
        assert 0 < policy.spare_wait_s < limit_s


@quick
@given(st.permutations(range(4)), st.sets(st.integers(0, 3), max_size=2), st.booleans())
def test_later_cycles_keep_who_ran_in_their_places_and_spares_replace_the_bad(order, bad, reconnecting) -> None:
    """`order`: the first two of these ran, with these node ranks. A node that only reconnects is waited for."""
    ran = order[:2]
    nodes = tuple(
        NodeObservation(
            name=f"node{i}",
            node_rank=ran.index(i) if i in ran else None,
            silence_s=99.0 if i in bad else 0.2,
            connected=not (reconnecting and i == ran[0]),
        )
        for i in range(4)
    )
    decision = decide_cycle(w.cycle(*nodes, stage=Stage.IDLE, stage_s=1.0), History(), POLICY)
    good_spares = [i for i in range(4) if i not in ran and i not in bad]
    if reconnecting and ran[0] not in bad:
        assert decision.action is Action.WAIT and f"node{ran[0]}" in decision.reason
        return
    expected = [f"node{i}" if i not in bad else None for i in ran]
    if expected.count(None) > len(good_spares):
        assert decision.action is Action.WAIT
        return
    spares = iter(good_spares)
    assert decision.nodes == tuple(name or f"node{next(spares)}" for name in expected)


def test_nodes_that_never_came_did_not_fall_silent_together() -> None:
    """Five of eight nodes never start: the allocation is given up at the start limit, not waited in for ever."""
    when, decision = first_start([0.0, 0.0, 0.0, None, None, None, None, None], num_nodes=8)
    assert (decision.rule, decision.action) == ("waiting-for-agents", Action.END)
    assert when == POLICY.start_limit_s + 5 and len(decision.exclude) == 5


def test_with_too_few_nodes_that_could_ever_train_the_allocation_is_given_up_at_once() -> None:
    seen = w.cycle(w.node(0), w.node(1), stage=Stage.IDLE, stage_s=0.1, excluded=("node1",))
    decision = decide_cycle(seen, History(), POLICY)
    assert (decision.rule, decision.action, decision.outcome) == ("waiting-for-agents", Action.END, "continue")
    assert decision.exclude == ("node1",)
