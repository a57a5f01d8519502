"""The supervisor's parts: hub, edges, what it makes of its agents' words, the parts of a recovery's time."""

import socket
import time
from pathlib import Path

import pytest

from orchestrator.agent import proc
from orchestrator.agent.messages import (
    Alive,
    Exited,
    Hello,
    RankReport,
    Refused,
    Report,
    Start,
    Stop,
    Stopped,
    Verdict,
    to_wire,
)
from orchestrator.agent.plan import AttemptPlan
from orchestrator.decide.observation import VerdictKind
from orchestrator.errors import PawlError
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Outcome, OutcomeKind, parse_cycle
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise import channel
from orchestrator.supervise.edge import EdgeNode, LocalEdge, SlurmEdge, agent_argv, srun_argv
from orchestrator.supervise.hub import Heard, Hub
from orchestrator.supervise.nodes import Nodes
from orchestrator.supervise.start import answer_hello, end_cycle, new_epoch, write_cycle
from orchestrator.supervise.times import CycleTimes, Recovery, furthest_step

KEY = b"s" * 32


def plan_of(**changes):
    values = {"run": "r", "attempt": 1, "nonce": "n1", "launcher": "local", "num_nodes": 2, "num_spares": 1}
    return AttemptPlan(**{**values, "ranks_per_node": 2, "world_size": 4, **changes})


@pytest.fixture
def hub():
    hub = Hub(host="127.0.0.1", key=KEY, attempt=1, nodes=frozenset({"node0", "node1"}), beat_interval_s=0.2)
    hub.start()
    yield hub
    hub.stop()


def dial(hub, key=KEY):
    return channel.connect(("127.0.0.1", hub.port), key=key, timeout_s=2)


def pump(connection, done, limit_s=5.0):
    messages, deadline = [], time.monotonic() + limit_s
    while not done(messages) and connection.closed is None:
        assert time.monotonic() < deadline, messages
        channel.wait(connection, timeout_s=0.05)
        messages += connection.receive()
    return messages


def test_the_hub_hears_agents_and_keeps_them_informed(hub):
    agent = dial(hub)
    agent.send(to_wire(Hello(node="node0", pid=1, attempt=1)))
    assert hub.silence_s("node0") is None and not hub.connected("node0")
    pump(agent, lambda messages: len(messages) >= 2)
    heard = hub.inbox.get(timeout=2)
    assert heard.node == "node0" and isinstance(heard.message, Hello)
    assert hub.connected("node0") and hub.silence_s("node0") < 2 and hub.silence_s("node1") is None
    assert hub.send("node0", Start(cycle=1)) and not hub.send("node1", Start(cycle=1))
    messages = pump(agent, lambda messages: any(m["kind"] == "start" for m in messages))
    assert any(message == to_wire(Alive(generation=1)) for message in messages) or len(messages) == 1
    agent.close("test")
    assert hub.inbox.get(timeout=2).message is None and not hub.connected("node0")


@pytest.mark.parametrize(
    "hello", [Hello(node="node9", pid=1, attempt=1), Hello(node="node0", pid=1, attempt=2), Start(cycle=1)]
)
def test_who_is_no_agent_of_this_attempt_is_dropped(hub, hello):
    agent = dial(hub)
    agent.send(to_wire(hello))
    pump(agent, lambda messages: False)
    assert agent.closed is not None and hub.inbox.empty()


def test_who_does_not_hold_the_key_is_dropped(hub):
    stranger = dial(hub, key=b"x" * 32)
    stranger.send(to_wire(Hello(node="node0", pid=1, attempt=1)))
    pump(stranger, lambda messages: False)
    assert stranger.closed is not None and hub.inbox.empty() and not hub.connected("node0")


def test_a_new_connection_of_a_node_takes_the_place_of_the_old_one(hub):
    first, second = dial(hub), None
    first.send(to_wire(Hello(node="node0", pid=1, attempt=1)))
    pump(first, lambda messages: messages)
    second = dial(hub)
    second.send(to_wire(Hello(node="node0", pid=1, attempt=1)))
    pump(second, lambda messages: messages)
    pump(first, lambda messages: False)
    assert hub.connected("node0") and first.closed is not None
    second.close("test")


def nodes_with_cycle():
    nodes = Nodes(tuple(EdgeNode(name=f"node{i}", address="127.0.0.1") for i in range(3)))
    nodes.begin(Epoch(1, 1, 2), ("node0", "node2"))
    return nodes


def rank_report(rank, *, phase="step", step=5, state="S"):
    return RankReport(rank=rank, pid=1, state=state, phase=phase, step=step, quiet_s=0.5)


def say(nodes, node, message, now_unix=100.0):
    nodes.take(Heard(node=node, message=message, at=0.0), now_unix=now_unix)


def see(nodes, name, outcomes=()):
    view = nodes.views[name]
    return nodes.observe(view, connected=True, silence_s=0.1, lost=None, outcomes=outcomes)


def test_nodes_keep_their_ranks_and_forget_other_cycles():
    nodes = nodes_with_cycle()
    assert [view.name for view in nodes.training] == ["node0", "node2"]
    say(nodes, "node0", Report(cycle=1, running=True, ranks=(rank_report(0, step=99),)))
    assert nodes.step is None and see(nodes, "node0").ranks == ()
    say(nodes, "node0", Report(cycle=2, running=True, ranks=(rank_report(0), rank_report(1, step=4))))
    assert nodes.step == 5 and [rank.step for rank in see(nodes, "node0").ranks] == [5, 4]
    assert see(nodes, "node0").ranks[0].epoch == Epoch(1, 1, 2) and see(nodes, "node1").node_rank is None
    say(nodes, "node2", Exited(cycle=1, code=1))
    assert see(nodes, "node2").torchrun_exit is None and not nodes.all_ended


def test_ranks_before_their_first_beat_have_no_epoch():
    nodes = nodes_with_cycle()
    say(nodes, "node0", Report(cycle=2, running=True, ranks=(rank_report(0, phase=None, step=None),)))
    assert see(nodes, "node0").ranks[0].epoch is None and not nodes.all_started


def test_a_verdict_keeps_the_time_of_its_first_telling():
    nodes = nodes_with_cycle()
    verdict = Verdict(
        **{"kind": VerdictKind.STOPPED, "rank": 1, "phase": "step", "step": 5, "quiet_s": 3.0, "limit_s": 2.0},
        **{"message": "rank 1 is stopped", "ago_s": 2.5},
    )
    for now_unix in (100.0, 101.0):
        say(nodes, "node0", Report(cycle=2, running=True, verdicts=(verdict,)), now_unix)
    (found,) = see(nodes, "node0").verdicts
    assert (found.fault_unix, found.detected_unix, found.node) == (97.5, 100.0, "node0")


def outcome_of(rank, kind, code):
    known = {"epoch": Epoch(1, 1, 2), "step": 5, "phase": "step", "message": "", "written_unix": 1.0}
    return Outcome(rank=rank, kind=kind, exit_code=code, **known)


def test_torchruns_1_for_drained_workers_is_no_failure():
    nodes = nodes_with_cycle()
    say(nodes, "node0", Report(cycle=2, running=False, ranks=(rank_report(0), rank_report(1))))
    say(nodes, "node0", Exited(cycle=2, code=1))
    drained = [outcome_of(rank, OutcomeKind.DRAINED, 75) for rank in (0, 1)]
    assert see(nodes, "node0", tuple(drained)).torchrun_exit == 0
    assert see(nodes, "node0", (drained[0],)).torchrun_exit == 1
    crashed = (drained[0], outcome_of(1, OutcomeKind.CRASHED, 1))
    assert see(nodes, "node0", crashed).torchrun_exit == 1


def test_a_refused_start_is_a_finding_and_an_end():
    nodes = nodes_with_cycle()
    say(nodes, "node2", Refused(cycle=2, why="no room"))
    found = see(nodes, "node2")
    assert found.torchrun_exit == 1 and found.verdicts[0].kind is VerdictKind.PREFLIGHT
    assert "no room" in found.verdicts[0].message


class Sent:
    """Stands for the hub where only what is sent matters."""

    def __init__(self):
        self.messages = []

    def send(self, node, message):
        self.messages.append((node, message))
        return True


@pytest.mark.parametrize(
    ("cycle", "running", "expected"),
    [
        (0, True, Start(cycle=2)),
        (2, True, None),
        (1, True, Stop(cycle=1, evidence=False)),
        (2, False, Stop(cycle=2, evidence=False)),
        (0, False, None),
    ],
)
def test_an_agent_that_comes_back_is_told_what_it_may_have_missed(cycle, running, expected):
    nodes, sent = nodes_with_cycle(), Sent()
    answer_hello(nodes, sent, "node0", Hello(node="node0", pid=1, attempt=1, cycle=cycle), running=running)
    assert sent.messages == ([] if expected is None else [("node0", expected)])


def test_a_cycle_record_is_written_whole_with_a_fresh_port(tmp_path):
    paths = RunPaths(tmp_path)
    paths.cycles(1).mkdir(parents=True)
    used, nodes = set(), (("node0", "127.0.0.1"), ("node2", "127.0.0.1"))
    for number in (1, 2):
        epoch = new_epoch(paths, 1, 1, after=0)
        assert epoch == Epoch(1, 1, number)
        cycle = write_cycle(paths, plan_of(), epoch, nodes=nodes, resume_from=None, used_ports=used)
        assert parse_cycle(paths.cycle_file(1, number).read_text()) == cycle
        assert paths.cycle_file(1, number).stat().st_mode & 0o022 == 0
    assert len(used) == 2


def test_loopback_between_real_nodes_is_refused_before_anything_starts(tmp_path):
    """S9."""
    paths = RunPaths(tmp_path)
    paths.cycles(1).mkdir(parents=True)
    epoch = new_epoch(paths, 1, 1, after=0)
    with pytest.raises(PawlError, match="loopback"):
        write_cycle(
            paths,
            plan_of(launcher="slurm"),
            epoch,
            nodes=(("a", "127.0.1.1"), ("b", "10.0.0.2")),
            resume_from=None,
            used_ports=set(),
        )
    assert not paths.cycle_file(1, 1).exists()


def test_the_agents_step_is_one_srun_over_all_nodes():
    agent = agent_argv(RunPaths(Path("/r")), plan_of(), ("torchrun", "--x={shm}"), connect="h:1")
    assert agent[agent.index("--") + 1 :] == ("torchrun", "--x={shm}") and "--node" not in agent
    argv = srun_argv(plan_of(), agent, nodes=("a", "b", "c"), cpus_per_task=4)
    assert argv[0] == "srun"
    for flag in ("--no-kill", "--overlap", "--export=ALL", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"):
        assert flag in argv
    assert "--cpus-per-task=4" in argv and "--nodelist=a,b,c" in argv and argv[-len(agent) :] == list(agent)
    assert not [flag for flag in srun_argv(plan_of(), agent, nodes=("a",), cpus_per_task=None) if "cpus" in flag]


def test_slurms_nodes_come_from_the_job_and_must_suffice():
    paths = RunPaths(Path("/r"))
    edge = SlurmEdge(paths, plan_of(), (), environ={"SLURM_JOB_NODELIST": "n[1-2],m7"})
    assert [node.name for node in edge.nodes] == ["n1", "n2", "m7"] and edge.own_address == socket.gethostname()
    with pytest.raises(PawlError, match="1 node"):
        SlurmEdge(paths, plan_of(), (), environ={"SLURM_JOB_NODELIST": "n1"})
    with pytest.raises(PawlError, match="inside a Slurm job"):
        SlurmEdge(paths, plan_of(), (), environ={})


def test_virtual_nodes_are_training_nodes_and_spares():
    edge = LocalEdge(RunPaths(Path("/r")), plan_of(nonce="no-such-nonce"), ())
    assert [node.name for node in edge.nodes] == ["node0", "node1", "node2"]
    assert edge.agent_dead("node0") is None and edge.close() == 0 and proc.find(nonce="no-such-nonce") == ()


def test_a_recoverys_parts_add_up():
    times = CycleTimes(started_at=10.0)
    assert not times.note(12.0, all_started=False, stepped=False)
    assert not times.note(14.0, all_started=True, stepped=False)
    assert times.note(17.0, all_started=True, stepped=True)
    assert not times.note(18.0, all_started=True, stepped=True)
    recovery = Recovery(
        incident="i", cls="node_down", level="L2", detection_s=3.0, detected_at=5.0, backoff_s=2.0, reached_step=47
    )
    data = recovery.data(times, resumed_step=40)
    parts = [data[f"{part}_s"] for part in ("detection", "teardown", "backoff", "start", "load")]
    assert parts == [3.0, 3.0, 2.0, 4.0, 3.0] and data["total_s"] == 15.0 and data["lost_steps"] == 7


def test_what_is_unknown_of_a_recovery_stays_unknown():
    times = CycleTimes(started_at=10.0)
    recovery = Recovery(
        incident="i", cls="unknown", level=None, detection_s=None, detected_at=9.0, backoff_s=0.0, reached_step=None
    )
    data = recovery.data(times, resumed_step=0)
    assert data["detection_s"] is None and data["lost_steps"] is None and data["start_s"] is None


@pytest.mark.parametrize(
    ("reached", "resumed", "furthest"), [(0, 1166, 1166), (47, 40, 47), (47, None, 47), (None, 40, None), (0, None, 0)]
)
def test_a_checkpoint_that_could_not_be_loaded_holds_steps_that_are_lost(reached, resumed, furthest):
    """A cycle that fails in RESTORE beats step 0, but what it was to load had come further."""
    assert furthest_step(reached, resumed=resumed) == furthest


class Ears:
    """A hub of which only the questions of `end_cycle` are asked."""

    def __init__(self, silence_s, connected=("node0", "node2")):
        self.silent, self.open, self.sent = silence_s, connected, []

    def send(self, node, message):
        self.sent.append((node, message))
        return True

    def silence_s(self, node):
        return self.silent[node]

    def connected(self, node):
        return node in self.open


class Hands:
    def __init__(self, dead=()):
        self.dead, self.cleaned = dead, []

    def agent_dead(self, node):
        return "its agent ended by signal 9" if node in self.dead else None

    def clean(self, node):
        self.cleaned.append(node)
        return None


@pytest.mark.parametrize(
    ("silence_s", "connected", "dead"),
    [
        ({"node0": 0.1, "node2": 3.1}, ("node0", "node2"), ()),
        ({"node0": 0.1, "node2": None}, ("node0", "node2"), ()),
        ({"node0": 0.1, "node2": 0.1}, ("node0",), ()),
        ({"node0": 0.1, "node2": 0.1}, ("node0", "node2"), ("node2",)),
    ],
    ids=["silent", "never heard", "connection closed", "dead"],
)
def test_a_node_that_cannot_answer_holds_up_no_teardown(silence_s, connected, dead):
    """A connected agent that beats no more (stopped, or its machine hangs) is as lost as a dead one."""
    nodes, ears, hands, waits = nodes_with_cycle(), Ears(silence_s, connected), Hands(dead), []

    def pump(seconds):
        waits.append(seconds)
        assert len(waits) < 5, "waits for a node that cannot answer"
        if len(waits) == 2:
            say(nodes, "node0", Stopped(cycle=2, seconds=0.1, killed=2, remaining=0))

    found = end_cycle(nodes, ears, hands, evidence=True, pump=pump, silence_limit_s=3.0)
    assert found.unanswered == ("node2",) and hands.cleaned == ["node2"] and found.orphans is None
    assert {(node, message.cycle) for node, message in ears.sent} == {("node0", 2), ("node2", 2)}


def test_an_agent_that_wakes_up_after_its_cycle_was_ended_without_it_is_told_to_stop():
    """Its Stop waits in the connection; after a reconnection it is said again, and no newer cycle is offered to it."""
    nodes, ears = nodes_with_cycle(), Ears({"node0": 0.1, "node1": 0.1, "node2": 9.0})
    end_cycle(
        nodes,
        ears,
        Hands(),
        evidence=False,
        pump=lambda _s: say(nodes, "node0", Stopped(cycle=2, seconds=0.0, killed=0, remaining=0)),
        silence_limit_s=3.0,
    )
    assert ("node2", Stop(cycle=2, evidence=False)) in ears.sent
    nodes.begin(Epoch(1, 1, 3), ("node0", "node1"))
    ears.sent.clear()
    answer_hello(nodes, ears, "node2", Hello(node="node2", pid=1, attempt=1, cycle=2), running=True)
    assert ears.sent == [("node2", Stop(cycle=2, evidence=False))]
    say(nodes, "node2", Report(cycle=2, running=True, ranks=(rank_report(3, step=99),)))
    say(nodes, "node2", Exited(cycle=2, code=1))
    assert nodes.step is None and nodes.views["node2"].torchrun_exit is None, "its late words are of another cycle"
