"""Health of ranks and nodes: limits per phase, silence, what is never taken for death."""

import orch_worlds as w
import pytest

from orchestrator.decide.health import NodeState, RankState, assess, judge_rank
from orchestrator.decide.observation import CycleObservation, RankObservation
from orchestrator.decide.policy import PhaseLimit, Policy, policy_from_config
from orchestrator.decide.taxonomy import FailureClass
from orchestrator.state.epochs import Epoch

POLICY = Policy(beat_interval_s=1.0)


def states(seen: CycleObservation, policy: Policy = POLICY) -> list[RankState]:
    return [rank.state for rank in assess(seen, policy).ranks]


def with_ranks(*ranks: RankObservation, **more: object) -> CycleObservation:
    return w.cycle(
        w.node(0, ranks=tuple(r for r in ranks if r.node == "node0")),
        w.node(1, ranks=tuple(r for r in ranks if r.node == "node1")),
        w.node(2, spare=True),
        **more,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("p99", "limit"),
    [(None, 600.0), (0.1, 10.0), (5.0, 15.0), (1e6, 600.0)],
    ids=["unlearned", "floor", "p99", "ceiling"],
)
def test_a_limit_is_p99_times_factor_between_floor_and_ceiling(p99: float | None, limit: float) -> None:
    assert PhaseLimit(floor_s=10, factor=3, ceiling_s=600).limit_s(p99) == limit


def test_h1_the_moment_after_a_long_save_is_no_hang_either() -> None:
    """Rank 0 has left its save for the next step; the other node's last word, a beat older, is still of the wait.

    Case H1 (FlagScale#1267, pytorch/xla#1728).
    """
    stepping = w.rank(0, "node0", phase="step", phase_age_s=0.2)
    waiting = [w.rank(r, f"node{r // 2}", phase="step", phase_age_s=89.0) for r in (1, 2, 3)]
    health = assess(with_ranks(stepping, *waiting, p99_s={"step": 0.5}), POLICY)
    assert not health.stuck and not health.suspects
    assert [rank.state for rank in health.ranks] == [RankState.OK, *[RankState.WAITING] * 3]


def test_h1_a_long_save_is_legal_and_a_step_that_waits_for_it_too() -> None:
    """H1. FlagScale#1267: the save took longer than the limit of a step, and the job was shot in the middle of it."""
    saving = w.rank(0, "node0", phase="save", phase_age_s=90.0)
    waiting = [w.rank(r, f"node{r // 2}", phase="step", phase_age_s=89.0) for r in (1, 2, 3)]
    seen = with_ranks(saving, *waiting, p99_s={"step": 0.5})
    health = assess(seen, POLICY)
    assert [rank.state for rank in health.ranks] == [RankState.OK, *[RankState.WAITING] * 3]
    assert not health.stuck and not health.suspects


def test_h1_a_save_beyond_its_own_limit_is_caught_and_named() -> None:
    """H1 (FlagScale#1267, pytorch/xla#1728)."""
    saving = w.rank(0, "node0", phase="save", phase_age_s=3601.0)
    waiting = [w.rank(r, f"node{r // 2}", phase="step", phase_age_s=3600.5) for r in (1, 2, 3)]
    health = assess(with_ranks(saving, *waiting, p99_s={"step": 0.5}), POLICY)
    assert [suspect.rank for suspect in health.suspects] == [0]
    assert "save" in health.suspects[0].why


@pytest.mark.parametrize("phase", ["init", "compile", "restore", "eval", "data"])
def test_h1_every_long_phase_has_its_own_limit(phase: str) -> None:
    """H1 (FlagScale#1267, pytorch/xla#1728)."""
    legal = with_ranks(w.rank(0, "node0", phase=phase, phase_age_s=100.0), w.rank(2, "node1", phase_age_s=99.0))
    assert RankState.STUCK not in states(legal, POLICY)
    over = POLICY.phase_limits[phase].ceiling_s + 1
    hung = with_ranks(w.rank(0, "node0", phase=phase, phase_age_s=over), w.rank(2, "node1", phase_age_s=1.0))
    assert states(hung)[0] is RankState.STUCK


def test_h3_a_beat_of_another_launch_is_ignored_and_start_up_is_allowed_for() -> None:
    """H3. loom#4400: the file of an earlier run made a fresh start look dead."""
    old = w.rank(0, "node0", epoch=Epoch(1, 1, 9), phase="step", step=500, phase_age_s=1e6)
    fresh = judge_rank(old, epoch=w.EPOCH, running_s=5.0, policy=POLICY, p99_s={})
    assert fresh.state is RankState.STARTING and fresh.step is None and fresh.phase is None
    late = judge_rank(old, epoch=w.EPOCH, running_s=901.0, policy=POLICY, p99_s={})
    assert late.state is RankState.STUCK


def test_a_stopped_rank_is_the_suspect_not_those_that_wait_for_it() -> None:
    ranks = [w.rank(r, f"node{r // 2}", phase_age_s=30.0) for r in range(3)]
    seen = with_ranks(*ranks, w.rank(3, "node1", phase_age_s=30.0, process="T"), p99_s={"step": 1.0})
    assert [suspect.rank for suspect in assess(seen, POLICY).suspects] == [3]


@pytest.mark.parametrize("behind", [{"step": 6}, {"collective_seq": 90}])
def test_the_rank_behind_is_the_suspect(behind: dict[str, int]) -> None:
    ranks = [w.rank(r, f"node{r // 2}", phase_age_s=30.0) for r in range(3)]
    seen = with_ranks(*ranks, w.rank(3, "node1", phase_age_s=30.0, **behind), p99_s={"step": 1.0})
    assert [suspect.rank for suspect in assess(seen, POLICY).suspects] == [3]


def test_when_all_wait_in_the_same_place_nobody_is_named() -> None:
    ranks = [w.rank(r, f"node{r // 2}", phase_age_s=30.0) for r in range(4)]
    health = assess(with_ranks(*ranks, p99_s={"step": 1.0}), POLICY)
    assert len(health.stuck) == 4 and not health.suspects


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"silence_s": 2.9}, NodeState.OK),
        ({"silence_s": 3.1}, NodeState.SILENT),
        ({"silence_s": 2.1, "connected": False}, NodeState.SILENT),
        ({"silence_s": 1.9, "connected": False}, NodeState.OK),
        ({"silence_s": 0.1, "lost": "NODE_FAIL"}, NodeState.LOST),
        ({"silence_s": None}, NodeState.STARTING),
    ],
)
def test_silence_of_a_node(more: dict[str, object], state: NodeState) -> None:
    assert assess(w.cycle(w.node(0), w.node(1, **more)), POLICY).nodes[1].state is state


def test_a_loop_that_was_late_itself_judges_no_silence() -> None:
    seen = w.cycle(w.node(0, silence_s=8.0), w.node(1, silence_s=8.0), loop_late_s=2.1)
    assert [node.state for node in assess(seen, POLICY).nodes] == [NodeState.UNKNOWN] * 2
    seen = w.cycle(w.node(0, silence_s=8.0), w.node(1, silence_s=8.0), loop_late_s=1.9)
    assert [node.state for node in assess(seen, POLICY).nodes] == [NodeState.SILENT] * 2


@pytest.mark.parametrize(
    ("silent", "total", "suppressed"), [(2, 4, False), (3, 4, True), (3, 15, False), (4, 15, True)]
)
def test_correlated_silence_needs_three_nodes_and_a_fifth(silent: int, total: int, suppressed: bool) -> None:
    nodes = [w.node(i, silence_s=50.0 + i if i < silent else 0.1) for i in range(total)]
    health = assess(w.cycle(*nodes, num_nodes=total), POLICY)
    assert (health.correlated_s is not None) is suppressed
    assert len(health.dead_nodes) == (0 if suppressed else silent)
    if suppressed:
        assert health.correlated_s == 50.0


def test_what_an_unheard_node_last_said_of_its_ranks_proves_nothing() -> None:
    old = (w.rank(0, "node0", phase_age_s=50.0), w.rank(1, "node0", phase_age_s=50.0))
    health = assess(w.cycle(w.node(0, silence_s=9.0, ranks=old), w.node(1), p99_s={"step": 0.1}), POLICY)
    assert [rank.state for rank in health.ranks[:2]] == [RankState.UNKNOWN] * 2


def test_a_policy_takes_what_the_config_gives_and_keeps_the_rest() -> None:
    policy = policy_from_config(
        {
            "beat_interval_s": 1.0,
            "backoff_s": [0, 1],
            "budgets": {"rank_crash": 7},
            "silence_intervals": None,
            "phase_limits": {"step": {"floor_s": 2.0, "factor": None}, "nonsense": {"floor_s": 1.0}},
        },
    )
    assert policy.beat_interval_s == 1.0 and policy.silence_limit_s == 3.0 and policy.backoff_s == (0.0, 1.0)
    assert policy.budget(FailureClass.RANK_CRASH) == 7 and policy.budget(FailureClass.DATA_ERROR) == 1
    assert policy.phase_limits["step"] == PhaseLimit(floor_s=2.0, factor=3.0, ceiling_s=600.0)
    assert "nonsense" not in policy.phase_limits
    with pytest.raises(ValueError, match="no_such_class"):
        policy_from_config({"budgets": {"no_such_class": 1}})
