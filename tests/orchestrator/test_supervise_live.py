"""Supervisor, agents and ranks as real processes: what fails is found, named, repaired on the cheapest rung, recorded.

The trainer is a stand-in without torch (fake_trainer.py). Cases H1, H3, H7, R22, X6.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import orch_worlds as w
import pytest

from orchestrator.agent import proc
from orchestrator.control.clock import SystemClock
from orchestrator.control.controller import reconcile
from orchestrator.control.launch_local import start_attempt
from orchestrator.decide.observation import Liveness
from orchestrator.decide.policy import Policy
from orchestrator.metrics.run import run_samples
from orchestrator.state.records import Verb
from orchestrator.state.requests import make_request, new_ulid, write_request
from orchestrator.state.rundir import make_layout
from orchestrator.views import explain, status, watch
from orchestrator.views.read import read_run
from orchestrator.views.run_view import build_view

spec = importlib.util.spec_from_file_location("live_run", Path(__file__).with_name("live_run.py"))
live_run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(live_run)


@pytest.fixture
def make(tmp_path):
    runs = []

    def build(**options):
        runs.append(live_run.LiveRun(tmp_path / "run", **options))
        return runs[-1]

    yield build
    for run in runs:
        run.stop()


def check_clean(run):
    assert run.processes() == (), "orphans"
    assert not list(Path("/dev/shm").glob(f"pawl-*-{run.nonce}-*"))
    assert json.loads(run.paths.targets.read_text()) == []


def check_steps(run, cycles):
    """Every step once or again after a restart, none left out, and the last launch of each ends the run."""
    last = [step for cycle in range(1, cycles + 1) for step in run.step(cycle)]
    assert sorted(set(last)) == list(range(1, run.steps + 1)), run.story()


def test_an_undisturbed_run_is_done_in_one_cycle(make):
    """H3 (loom#4400)."""
    run = make().start()
    assert run.join() == ("done", 0), run.story()
    assert run.step(1) == list(range(1, 21))
    assert [d["step"] for d in run.data("checkpoint_committed")] == [5, 10, 15, 20]
    (started,) = run.data("cycle_started")
    assert (started["nodes"], started["spares"], started["resume_from"]) == (["node0", "node1"], ["node2"], None)
    assert run.data("cycle_running")[0]["start_s"] >= 0
    assert run.data("run_done") == [{"step": 20}]
    assert run.data("incident") == []
    nodes = json.loads(run.paths.nodes(1).read_text())["nodes"]
    assert [(node["name"], node["spare"]) for node in nodes] == [("node0", False), ("node1", False), ("node2", True)]
    check_clean(run)


def test_a_killed_rank_is_named_and_the_cycle_restarts_on_the_same_nodes(make):
    """H7 (pytorch/elastic#134, pytorch#97191)."""
    run = make()
    run.fault({"cycle": 1, "rank": 3, "step": 7, "kind": "crash"})
    run.start()
    assert run.join() == ("done", 0), run.story()
    (incident,) = run.data("incident")
    assert (incident["class"], incident["level"]) == ("rank_crash", "L1")
    assert (incident["rank"], incident["node"]) == (3, "node1")
    assert "signal 9" in incident["message"]
    restarts = [f for f in run_samples([build_view(read_run(run.paths.root))]) if f.name == "pawl_restarts"]
    totals = [(s.labels["level"], s.labels["class"], s.value) for f in restarts for s in f.samples]
    assert totals == [("L1", "rank_crash", 1.0)]
    first, second = run.data("cycle_started")
    assert second["nodes"] == first["nodes"] and second["resume_from"] == "step-000000005.a0001g01c0001"
    assert second["incident"] == incident["id"]
    (recovered,) = run.data("recovered")
    parts = [recovered[f"{part}_s"] for part in ("detection", "teardown", "backoff", "start", "load")]
    assert recovered["total_s"] == pytest.approx(sum(parts), abs=0.01)
    assert recovered["total_s"] < 15 and recovered["lost_steps"] in (2, 3)
    check_steps(run, 2)
    check_clean(run)


def test_a_killed_node_is_replaced_by_the_spare(make):
    run = make(steps=40, save_every=5).start()
    run.wait(lambda: max(run.step(1), default=0) >= 7)
    killed = time.time()
    for process in run.processes("node1"):
        proc.send(process, signal.SIGKILL)
    incident = run.wait_event("incident")
    assert incident["detected_unix"] - killed < 4
    assert (incident["class"], incident["level"], incident["node"]) == ("node_down", "L2", "node1")
    assert run.join() == ("done", 0), run.story()
    second = run.data("cycle_started")[1]
    assert second["nodes"] == ["node0", "node2"] and second["resume_from"] is not None
    nodes = json.loads(run.paths.nodes(1).read_text())["nodes"]
    assert {node["name"]: node["spare"] for node in nodes} == {"node0": False, "node1": True, "node2": False}
    assert all(node["agent_pid"] for node in nodes)
    assert [d["orphans"] for d in run.data("teardown")] == [0, 0]
    assert any(path.endswith("rank-00000.stacks") for path in incident["evidence"])
    check_steps(run, 2)
    check_clean(run)


def test_a_lost_hot_spare_is_said_and_touches_nothing(make):
    run = make(steps=60, spares=2).start()
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    for process in run.processes("node2"):
        proc.send(process, signal.SIGKILL)
    run.wait(lambda: "spare-lost" in [d["rule"] for d in run.data("decision")])
    view = build_view(read_run(run.paths.root))
    (said,) = view.lost_spares
    assert said.startswith("hot spare node2 lost: its agent (pid") and said.endswith("1 spare left")
    assert {node.name: node.role for node in view.nodes}["node2"] == "excluded"
    assert said in explain.text(view) and "hot spare node2 lost" in " ".join(status.render(view, width=200).split())
    assert any(said in item.text for item in watch.news(view))
    assert run.join() == ("done", 0), run.story()
    assert run.data("incident") == [] and len(run.data("cycle_started")) == 1
    assert [d["rule"] for d in run.data("decision")].count("spare-lost") == 1
    check_clean(run)


def test_a_stopped_rank_is_named_with_its_state_and_stacks(make):
    """H7 (pytorch/elastic#134, pytorch#97191)."""
    run = make(steps=30)
    run.fault({"cycle": 1, "rank": 2, "step": 8, "kind": "stop"})
    run.start()
    incident = run.wait_event("incident")
    assert (incident["class"], incident["rank"], incident["node"]) == ("hang_local", 2, "node1")
    assert incident["phase"] == "step" and incident["step"] == 8 and incident["level"] == "L1"
    evidence = {Path(path).name: run.paths.root / path for path in incident["evidence"]}
    assert "misbehave" in evidence["rank-00002.stacks"].read_text()
    assert "meet" in evidence["rank-00000.stacks"].read_text()
    node = json.loads(evidence["node1.json"].read_text())
    assert {rank["rank"]: rank["state"] for rank in node["ranks"]}[2] == "T"
    assert run.join() == ("done", 0), run.story()
    check_steps(run, 2)
    check_clean(run)


def test_a_hanging_rank_is_found_by_its_phase_limit(make):
    limits = {"step": {"floor_s": 1.0, "factor": 3.0, "ceiling_s": 3.0}}
    run = make(steps=30, recovery={"phase_limits": limits})
    run.fault({"cycle": 1, "rank": 1, "step": 12, "kind": "hang"})
    run.start()
    incident = run.wait_event("incident")
    assert incident["class"] in ("hang_local", "hang_collective") and incident["phase"] == "step"
    stacks = "".join(p.read_text() for p in run.paths.evidence(1, 1).glob("rank-00001.stacks"))
    assert "misbehave" in stacks
    assert run.join() == ("done", 0), run.story()
    check_clean(run)


def test_a_save_longer_than_the_step_limit_is_legal_and_its_own_limit_holds(make):
    """H1. A step may last 1 s here, a save 4 s: one save takes 2.5 s, later one hangs."""
    limits = {
        "step": {"floor_s": 1.0, "factor": 3.0, "ceiling_s": 1.0},
        "save": {"floor_s": 4.0, "factor": 1.0, "ceiling_s": 4.0},
    }
    run = make(steps=15, recovery={"phase_limits": limits})
    slow = {"cycle": 1, "rank": 0, "step": 5, "kind": "save_slow", "value": 2.5}
    run.fault(slow, {**slow, "step": 10, "value": 3600})
    run.start()
    incident = run.wait_event("incident")
    assert incident["step"] == 10 and incident["phase"] == "save" and incident["rank"] == 0
    assert [d["step"] for d in run.data("checkpoint_committed")] == [5]
    assert run.join() == ("done", 0), run.story()
    check_clean(run)


def test_drain_saves_at_the_step_border_and_ends_the_attempt(make):
    run = make(steps=4000, save_every=1000, step_s=0.02).start()
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    write_request(run.paths, make_request(Verb.DRAIN, by="test", now_unix=time.time()), ulid=new_ulid())
    assert run.join() == ("drained", 0), run.story()
    (saved,) = run.data("checkpoint_committed")
    assert saved["step"] == run.step(1)[-1] < 1000
    outcomes = [json.loads(path.read_text()) for path in run.paths.outcomes(1, 1).glob("*.json")]
    assert {(o["kind"], o["exit_code"]) for o in outcomes} == {("drained", 75)} and len(outcomes) == 4
    assert run.data("request_done")[0]["verb"] == "drain" and not list(run.paths.control.iterdir())
    assert run.data("incident") == []
    check_clean(run)


def test_a_signal_to_the_supervisor_drains_and_asks_for_another_attempt(make):
    run = make(steps=4000, save_every=1000, step_s=0.02).start()
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    os.kill(run.pid, signal.SIGUSR2)
    assert run.join() == ("continue", 0), run.story()
    assert len(run.data("checkpoint_committed")) == 1
    check_clean(run)


def test_save_now_saves_and_a_second_supervisor_leaves_with_0(make):
    run = make(steps=60, save_every=1000).start()
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    write_request(run.paths, make_request(Verb.SAVE_NOW, by="test", now_unix=time.time()), ulid=new_ulid())
    plan = run.plan()
    second = subprocess.run([*plan["supervise"], *plan["torchrun"]], capture_output=True, text=True, timeout=20)
    assert second.returncode == 0 and "another process" in second.stdout
    assert run.claim().pid == run.pid
    assert run.join() == ("done", 0), run.story()
    saved = [d["step"] for d in run.data("checkpoint_committed")]
    assert len(saved) == 2 and saved[0] < 60 and saved[1] == 60
    assert run.data("request_done")[0]["result"] == "saved"
    assert len(run.data("attempt_started")) == 1


def ask_profile(run, *ranks, steps=3):
    request = make_request(Verb.PROFILE, by="test", now_unix=time.time(), steps=steps, ranks=ranks)
    write_request(run.paths, request, ulid=new_ulid())


def test_profiles_are_taken_one_after_the_other_and_put_no_save_off(make):
    """Two nodes of two ranks: ranks 0 and 3, then a rank alone; a checkpoint was asked for at the same time."""
    run = make(steps=80, save_every=1000).start()
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    ask_profile(run, 0, 3)
    write_request(run.paths, make_request(Verb.SAVE_NOW, by="test", now_unix=time.time()), ulid=new_ulid())
    ask_profile(run, 1, steps=1)
    run.wait_event("request_done", 3)
    assert run.join() == ("done", 0), run.story()
    done = run.data("request_done")
    assert [d["result"] for d in done if d["verb"] == "save-now"] == ["saved"]
    first, second = (d for d in done if d["verb"] == "profile")
    assert (first["result"], second["result"]) == ("profiled", "profiled") and first["where"] != second["where"]
    written = [sorted(path.name for path in (run.paths.root / d["where"]).iterdir()) for d in (first, second)]
    assert written == [["rank-00000.json.gz", "rank-00003.json.gz"], ["rank-00001.json.gz"]]
    assert not list(run.paths.control.iterdir())


def test_a_profile_that_nothing_came_of_is_answered_so_and_not_asked_for_again(make):
    run = make(steps=40)
    run.fault({"cycle": 1, "rank": 1, "step": 12, "kind": "crash"})
    run.start()
    run.wait(lambda: max(run.step(1), default=0) >= 2)
    ask_profile(run, 0, steps=100)
    assert run.join() == ("done", 0), run.story()
    (done,) = run.data("request_done")
    assert (done["verb"], done["result"], "where" in done) == ("profile", "not profiled", False)
    assert [d["rule"] for d in run.data("decision")].count("profile") == 1
    assert len(run.data("cycle_started")) == 2


def test_cancel_stops_at_once(make):
    run = make(steps=4000, save_every=1000).start()
    run.wait(lambda: max(run.step(1), default=0) >= 2)
    write_request(run.paths, make_request(Verb.CANCEL, by="test", now_unix=time.time()), ulid=new_ulid())
    assert run.join() == ("cancelled", 0), run.story()
    check_clean(run)


def test_agents_stop_their_ranks_when_the_supervisor_is_gone(make):
    run = make(steps=4000, save_every=1000).start()
    run.wait(lambda: max(run.step(1), default=0) >= 2)
    os.kill(run.pid, signal.SIGKILL)
    killed = time.monotonic()
    run.wait(lambda: run.processes() == ())
    assert 1.0 < time.monotonic() - killed < 12
    assert all("fake_trainer.py" in run.paths.stacks(1, 1, rank).read_text() for rank in range(4))


@pytest.mark.parametrize("how", ["moved", "replaced", "removed"])
def test_a_run_directory_that_vanishes_ends_everything_and_does_not_come_back(make, tmp_path, how):
    run = make(steps=4000, save_every=1000, recovery={"supervisor_lost_s": 600.0}).start()
    run.wait(lambda: max(run.step(1), default=0) >= 2)
    log = run.paths.supervisor_log(1).open()
    if how == "removed":
        # Ranks still write while it is removed, so once may not be enough.
        run.wait(lambda: shutil.rmtree(run.paths.root, ignore_errors=True) or not run.paths.root.exists())
    else:
        run.paths.root.rename(tmp_path / "elsewhere")
    if how == "replaced":
        make_layout(run.paths)
    run.wait(lambda: run.processes() == (), limit_s=90)
    assert os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1]) == 1
    run.pid = None
    said = [line for line in log.read().splitlines() if "is gone" in line]
    assert len(said) == 1 and said[0].startswith(f"supervisor: The run directory {run.paths.root} is gone: it was")
    assert list(run.paths.attempts.iterdir()) == [] if how == "replaced" else not run.paths.root.exists()
    assert not list(Path("/dev/shm").glob(f"pawl-*-{run.nonce}-*"))


def test_an_agent_alone_notices_that_the_run_directory_vanished(make, tmp_path):
    """Its supervisor is stopped, so it says nothing; nobody waits for it for ever."""
    run = make(steps=4000, save_every=1000, recovery={"supervisor_lost_s": 600.0}).start()
    run.wait(lambda: max(run.step(1), default=0) >= 2)
    logs = [path.open() for path in sorted(run.paths.attempt(1).glob("agent-*.log"))]
    os.kill(run.pid, signal.SIGSTOP)
    run.paths.root.rename(tmp_path / "elsewhere")
    run.wait(lambda: {process.pid for process in run.processes()} <= {run.pid}, limit_s=90)
    assert [text.count("is gone: it was removed") for text in (log.read() for log in logs)] == [1, 1, 1]


def test_a_bad_config_fails_the_run_without_a_restart(make):
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    run = make()
    run.fault({"cycle": 1, "rank": 0, "step": 0, "kind": "code", "value": {"kind": "config_error", "code": 78}})
    run.start()
    assert run.join() == ("failed", 1), run.story()
    assert len(run.data("cycle_started")) == 1 and len(run.data("run_failed")) == 1
    check_clean(run)


def test_a_crash_loop_is_held(make):
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    run = make(recovery={"max_cycles_without_checkpoint": 3, "budgets": {"rank_crash": 9}})
    run.fault(*({"cycle": cycle, "rank": 1, "step": 2, "kind": "crash"} for cycle in range(1, 9)))
    run.start()
    assert run.join(limit_s=60) == ("held", 3), run.story()
    assert len(run.data("run_held")) == 1 and 2 <= len(run.data("cycle_started")) <= 4
    check_clean(run)


def test_r22_data_that_raises_at_step_7_is_held_and_no_controller_starts_it_again(make):
    """R22 (metaseq#304): one restart from the checkpoint of step 5, then HELD with the first error; exit 3."""
    run = make()
    bad = {"kind": "data_error", "code": 88}
    run.fault(*({"cycle": cycle, "rank": 1, "step": 7, "kind": "code", "value": bad} for cycle in range(1, 9)))
    run.start()
    assert run.join() == ("held", 3), run.story()
    assert [d["resume_from"] is None for d in run.data("cycle_started")] == [True, False]
    (held,) = run.data("run_held")
    assert held["rule"] == "budget-exhausted" and "the first failure was: on command" in held["reason"]
    launcher = w.FakeLauncher(alive=Liveness.DEAD)
    looked = reconcile(run.paths, launcher=launcher, policy=Policy(), clock=SystemClock(), by="test")
    assert looked.decision.rule == "parked" and "the first failure was: on command" in looked.decision.reason
    assert launcher.launched == []
    check_clean(run)


def test_x6_a_secret_is_in_no_command_line_file_log_or_metric_of_a_run(make):
    """X6 (labs-molt#128): it travels in the environment of processes of this user, and nowhere else."""
    secret = "hunter2-in-the-open"
    run = make(steps=4000, save_every=1000)
    run.pid = start_attempt(run.paths, run.plan(), env={"HF_TOKEN": secret})
    run.wait(lambda: max(run.step(1), default=0) >= 3)
    (rank, *_) = (p for p in run.processes("node1") if b"fake_trainer" in command_line(p))
    assert f"HF_TOKEN={secret}".encode() in Path(f"/proc/{rank.pid}/environ").read_bytes()
    assert not [p for p in run.processes() if secret.encode() in command_line(p)]
    targets = [address for group in json.loads(run.paths.targets.read_text()) for address in group["targets"]]
    pages = [urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read() for address in targets]
    assert len(pages) == 3 and not [page for page in pages if secret.encode() in page]
    write_request(run.paths, make_request(Verb.DRAIN, by="test", now_unix=time.time()), ulid=new_ulid())
    assert run.join() == ("drained", 0), run.story()
    files = [path for path in run.paths.root.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if secret.encode() in path.read_bytes()]


def command_line(process):
    path = Path(f"/proc/{process.pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


def test_the_two_processes_start_without_heavy_imports():
    code = "import sys; import orchestrator.supervise.main, orchestrator.agent.main; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "pydantic", "rich", "typer", "yaml", "prometheus_client", "psutil", "starlette"}
    assert not heavy & set(done.stdout.split())
