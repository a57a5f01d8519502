"""What an agent reads, trusts, writes and says: plan, cycle, node record, messages, evidence, statistics, preflight."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.agent import evidence, preflight, proc, shm
from orchestrator.agent import record as agent_record
from orchestrator.agent.args import host_port, read_setup
from orchestrator.agent.cycle import CycleRefused, NodeContext, parse_summary, prepare, read_trusted
from orchestrator.agent.io import Worker
from orchestrator.agent.messages import Control, Exited, FailedRank, Hello, Report, Start, from_wire, to_wire
from orchestrator.agent.plan import fill, parse_plan
from orchestrator.agent.stats import StatsKeeper, add_stats, stats_json
from orchestrator.decide.policy import Policy
from orchestrator.errors import PawlError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Cycle, CycleNode, Unreadable
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise.channel import create_key

PLAN = {
    **{"schema_version": 1, "run": "r", "attempt": 1, "nonce": "n1", "launcher": "local", "num_nodes": 2},
    **{"ranks_per_node": 2, "world_size": 4, "torchrun": ["torchrun", "--node-rank={node_rank}", "{shm}"]},
}


def cycle_of(**changes):
    nodes = tuple(CycleNode(node_rank=i, name=f"node{i}", address="127.0.0.1") for i in range(2))
    values = {
        **{"run": "r", "epoch": Epoch(1, 1, 3), "nonce": "n1", "resume_from": None, "nodes": nodes},
        **{"ranks_per_node": 2, "world_size": 4, "master_addr": "127.0.0.1", "master_port": 12345},
        **{"beat_interval_s": 1.0, "created_unix": 1.0},
    }
    return Cycle(**{**values, **changes})


@pytest.fixture
def context(tmp_path):
    paths = RunPaths(tmp_path)
    paths.cycle(1, 3).mkdir(parents=True)
    return NodeContext(
        paths=paths,
        attempt=1,
        node="node1",
        nonce="n1",
        command=("torchrun", "--nnodes={nnodes}", "--node-rank={node_rank}", "{cycle_file}", "{shm}", "{other}"),
        policy=Policy(),
        env={},
        workdir=None,
    )


def write_cycle(context, cycle, mode=0o640):
    path = context.paths.cycle_file(1, 3)
    path.write_text(dumps(cycle))
    path.chmod(mode)
    return path


def test_a_cycle_becomes_this_nodes_command(context):
    """S11 (smollm launch.slurm)."""
    path = write_cycle(context, cycle_of())
    prepared = prepare(context, 3)
    shm_path = f"/dev/shm/pawl-{os.getuid()}-n1-node1"
    assert prepared.argv == ("torchrun", "--nnodes=2", "--node-rank=1", str(path), shm_path, "{other}")
    assert prepared.first_rank == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"nonce": "other"}, "another launch"),
        ({"epoch": Epoch(1, 1, 4)}, "another launch"),
        ({"epoch": Epoch(2, 1, 3)}, "another launch"),
        ({"nodes": (CycleNode(node_rank=0, name="node0", address="a"),)}, "does not name the node node1"),
        ({"world_size": 8}, "2 nodes × 2 ranks per node is not the world size 8"),  # S8
    ],
)
def test_a_cycle_that_is_not_this_nodes_is_refused_with_the_reason(context, changes, why):
    """S8 (pytorch-lightning#20391)."""
    write_cycle(context, cycle_of(**changes))
    with pytest.raises(CycleRefused, match=why):
        prepare(context, 3)


@pytest.mark.parametrize("mode", [0o660, 0o646, 0o666])
def test_a_cycle_that_others_may_write_is_refused(context, mode):
    write_cycle(context, cycle_of(), mode)
    with pytest.raises(CycleRefused, match="only its own files"):
        prepare(context, 3)


def test_a_link_and_a_fifo_in_the_place_of_a_record_are_refused(tmp_path):
    (tmp_path / "real").write_text("{}")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("link", "fifo", "absent"):
        with pytest.raises(CycleRefused):
            read_trusted(tmp_path / name)


def test_an_unreadable_cycle_is_refused(context):
    context.paths.cycle_file(1, 3).write_text('{"schema_version": 2}')
    with pytest.raises(CycleRefused, match="schema_version 2"):
        prepare(context, 3)


def test_only_known_placeholders_are_replaced():
    assert fill(("{a}{b}", "{c}", "x{a}"), {"a": "1", "b": "{a}"}) == ("1{a}", "{c}", "x1")


def test_the_plan_checks_its_own_sizes_and_times():
    assert parse_plan(json.dumps(PLAN)).supervisor_lost_s == 30.0
    wrong = parse_plan(json.dumps(PLAN | {"world_size": 8}))
    assert isinstance(wrong, Unreadable) and "2 nodes × 2 ranks per node" in wrong.why
    bad = parse_plan(json.dumps(PLAN | {"recovery": {"budgets": {"no_such_class": 1}}}))
    assert isinstance(bad, Unreadable) and "no_such_class" in bad.why


@pytest.mark.parametrize("text", ["node1", "node1:", ":80", "node1:0", "node1:65536", "node1:٣", ""])
def test_an_endpoint_without_host_or_port_is_refused(text):
    """S9 (nebius-solutions-library#177, pytorch#79388)."""
    with pytest.raises(PawlError, match="HOST:PORT"):
        host_port(text)


def test_endpoints():
    assert host_port("node1:80") == ("node1", 80) and host_port("[::1]:80") == ("::1", 80)


def test_an_agent_reads_its_setup_from_trusted_files_only(tmp_path):
    attempt = tmp_path / "attempts" / "0001"
    attempt.mkdir(parents=True)
    create_key(attempt / "channel.key")
    argv = ["--run-dir", str(tmp_path), "--attempt", "1", "--node", "node1", "--connect", "h:1"]
    argv += ["--key-file", str(attempt / "channel.key"), "--", "torchrun", "--x"]
    plan = attempt / "plan.json"
    plan.write_text(json.dumps(PLAN))
    plan.chmod(0o640)
    setup = read_setup(argv)
    assert setup.context.command == ("torchrun", "--x") and setup.context.nonce == "n1" and setup.address == ("h", 1)
    assert read_setup(argv[: argv.index("--")]).context.command == tuple(PLAN["torchrun"])
    plan.chmod(0o666)
    with pytest.raises(CycleRefused):
        read_setup(argv)


@pytest.mark.parametrize(
    "message",
    [
        Hello(node="n", pid=1, attempt=1),
        Report(cycle=1, running=True),
        Exited(cycle=1, code=1, failed=(FailedRank(rank=0, exit_code=-9),)),
        Start(cycle=2),
        Control(cycle=2, word="drain"),
    ],
)
def test_messages_survive_the_wire(message):
    assert from_wire(json.loads(json.dumps(to_wire(message)))) == message


@pytest.mark.parametrize(
    "body", [{}, {"kind": "start"}, {"kind": "start", "data": {"cycle": "1"}}, {"kind": "exec", "data": {}}]
)
def test_a_message_of_another_shape_is_unreadable(body):
    assert isinstance(from_wire(body), Unreadable)


def test_torchruns_summary_names_ranks_and_codes():
    text = (
        "Root Cause (first observed failure):\n[0]:\n  time      : 2026-01-01\n  host      : h\n"
        "  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: 4711)\n  error_file: <N/A>\n"
    )
    assert parse_summary(text) == (FailedRank(rank=3, exit_code=-9),)
    assert parse_summary("nothing of the kind") == ()


def record_of(num_ranks, seq=1):
    place = {"pid": 123456, "phase": "restore", "step": 10**9, "quiet_s": 1234.56}
    ranks = tuple(agent_record.RankPlace(rank=rank, **place) for rank in range(num_ranks))
    known = {"node": "node1", "host": "h", "agent_pid": 1, "epoch": Epoch(1, 1, 2), "unix": 1.5, "running": True}
    return agent_record.NodeRecord(seq=seq, ranks=ranks, **known)


def test_a_node_record_is_one_block_overwritten_in_place(tmp_path):
    path = tmp_path / "node1"
    for seq in (1, 2):
        agent_record.write_record(path, record_of(8, seq))
        assert path.stat().st_size == 4096
    assert agent_record.read_record(path) == record_of(8, 2)
    inode = path.stat().st_ino
    agent_record.write_record(path, record_of(1, 3))
    assert path.stat().st_ino == inode and agent_record.read_record(path).seq == 3


def test_a_torn_or_absent_node_record_is_unreadable(tmp_path):
    raw = bytearray(agent_record.encode_record(record_of(8)))
    raw[200] ^= 1
    for wrong in (bytes(raw), b"", b"x" * 4096, bytes(raw)[:100]):
        assert isinstance(agent_record.parse_record(wrong), Unreadable)
    assert isinstance(agent_record.read_record(tmp_path / "none"), Unreadable)


def test_ranks_that_do_not_fit_are_counted():
    record = agent_record.parse_record(agent_record.encode_record(record_of(200)))
    assert record.ranks_left_out > 0 and len(record.ranks) + record.ranks_left_out == 200


def stats_of(**values):
    zeros = {name: 0 for name in shm.Stats.__dataclass_fields__} | {"step_buckets": (0,) * 24}
    return shm.Stats(**{**zeros, **values})


def test_counters_add_up_over_cycles_and_gauges_do_not():
    first = stats_of(steps_total=10, loss=5.0, step_buckets=(1,) * 24)
    total = add_stats(first, stats_of(steps_total=3, loss=2.0, step_buckets=(2,) * 24))
    assert (total.steps_total, total.loss, total.step_buckets) == (13, 2.0, (3,) * 24)


def test_what_is_not_finite_is_none_in_json():
    values = stats_json(stats_of(mfu=float("nan"), loss=float("inf"), grad_norm=1.0))
    assert values["mfu"] is None and values["loss"] is None and values["grad_norm"] == 1.0
    assert json.loads(json.dumps(values, allow_nan=False))["step_buckets"] == [0] * 24
    assert stats_json(None) == {} and StatsKeeper().total(0) is None and StatsKeeper().blocks() == ()


def test_a_worker_answers_in_order_and_keeps_errors_as_values():
    worker = Worker("test")
    worker.submit("a", lambda: 1)
    worker.submit("b", lambda: 1 // 0)
    deadline, results = time.monotonic() + 5, []
    while len(results) < 2 and time.monotonic() < deadline:
        results += worker.results()
    assert [(r.name, r.value, type(r.error)) for r in results] == [
        ("a", 1, type(None)),
        ("b", None, ZeroDivisionError),
    ]
    assert worker.pending == 0


def test_preflight_names_what_is_missing_and_lets_the_unknown_pass(tmp_path):
    good = preflight.NodeFacts(shm_free_bytes=1 << 30, disk_free_bytes=None, num_cpus=1, strays=0)
    assert preflight.judge(good, run_dir=tmp_path) is None
    assert "2 ranks share 1 CPU" in preflight.advice(good, ranks_per_node=2)
    full = preflight.NodeFacts(shm_free_bytes=100, disk_free_bytes=None, num_cpus=8, strays=0)
    assert "/dev/shm has only 100 bytes" in preflight.judge(full, run_dir=tmp_path)
    assert preflight.advice(full, ranks_per_node=2) is None
    facts = preflight.look(tmp_path, nonce="nobody", node="n")
    assert facts.strays == 0 and facts.num_cpus >= 1 and facts.disk_free_bytes > 0


def suspect(process, stacks, rank=0):
    return evidence.Suspect(
        rank=rank, pid=process.pid, phase="step", step=1, collective_seq=2, quiet_s=0.5, stacks=stacks
    )


@pytest.fixture
def dumper(tmp_path):
    """A process that dumps its stack on SIGUSR2, as ranks do."""
    stacks = tmp_path / "rank-00000.stacks"
    code = (
        "import faulthandler, signal, sys, time\n"
        "faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], 'a'))\n"
        "def waits_here(): print('ready', flush=True); time.sleep(60)\n"
        "waits_here()\n"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code, str(stacks)], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process, stacks
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_rank_is_asked_for_its_stack(dumper):
    process, stacks = dumper
    found = evidence.collect([suspect(process, stacks)])
    assert found.ranks[0].answer == "faulthandler" and found.files == (stacks,)
    assert "waits_here" in stacks.read_text() and found.stopped_ranks == ()


def test_a_stopped_rank_is_recorded_as_stopped_and_still_answers(dumper):
    process, stacks = dumper
    process.send_signal(signal.SIGSTOP)
    while not proc.look(process.pid).is_stopped:
        time.sleep(0.01)
    found = evidence.collect([suspect(process, stacks)])
    assert found.stopped_ranks == (0,) and "waits_here" in stacks.read_text()


def test_a_process_that_does_not_catch_the_signal_is_not_killed_by_the_question(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = time.monotonic()
        found = evidence.collect([suspect(process, tmp_path / "rank-00000.stacks")])
        assert time.monotonic() - started < 2
        assert found.ranks[0].answer == "no answer" and found.files == () and process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_gone_is_said_to_be_gone(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    found = evidence.collect([suspect(process, tmp_path / "rank-00000.stacks")])
    assert found.ranks[0].answer == "the process was gone" and found.ranks[0].state is None


def test_last_lines_of_a_log_are_bounded(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(5000)))
    lines = evidence.last_lines(log)
    assert len(lines) == 60 and lines[-1].startswith("line 4999")
    assert evidence.last_lines(tmp_path / "none") == ()
