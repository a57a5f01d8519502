"""The controller on real run directories: one launch, however many look; every crash point ends the same."""

import threading
from pathlib import Path
from typing import Any

import orch_worlds as w
import pytest

from orchestrator.agent.proc import boot_id, own_start_ticks
from orchestrator.control import act
from orchestrator.control.controller import Handling, recheck_after_s, reconcile, reconcile_many, reconcile_once, watch
from orchestrator.control.observe import local_liveness, observe_run
from orchestrator.decide.decision import Action
from orchestrator.decide.observation import Liveness
from orchestrator.decide.policy import Policy
from orchestrator.errors import PawlError, UsageError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import RunState, replay
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Claim, Intent, LaunchFacts, MemoryPerRank, Verb, parse_intent
from orchestrator.state.requests import make_request, new_ulid, open_requests, read_requests, write_request
from orchestrator.state.rundir import RunPaths, make_attempt, make_layout

FACTS = LaunchFacts(
    run="x",
    project="p",
    world_size=4,
    dp=2,
    pp=2,
    tp=1,
    cp=1,
    tokens_per_step=8,
    samples_per_step=2,
    sequence_length=4,
    train_steps=100,
    checkpoint_interval=5,
    checkpoint_bytes=1,
    num_params=1,
    flops_per_step=1.0,
    flops_per_step_full_attn=1.0,
    flops_per_step_megatron=1.0,
    memory_per_rank_bytes=MemoryPerRank(parameters=1, gradients=1, optimizer=1, activations=1, logits=1, total=5),
    compute_dtype="float32",
    config_digest="d",
    vocab_size=8,
)


def make_run(root: Path) -> RunPaths:
    paths = RunPaths(root)
    make_layout(paths)
    paths.config.write_text("general: {run: x}\n")
    paths.config.chmod(0o640)
    paths.launch_facts.write_text(dumps(FACTS))
    return paths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return make_run(tmp_path / "x")


class Site:
    """One controller with its launcher and clock."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.clock, self.launcher = paths, w.HandClock(), w.FakeLauncher()

    def look(self, **more: Any) -> str:
        result = reconcile(self.paths, launcher=self.launcher, policy=Policy(), clock=self.clock, by="me", **more)
        assert result.decision is not None
        return result.decision.rule

    def state(self) -> RunState:
        return replay(read_all(self.paths.root)).state

    def supervisor_says(self, attempt: int, kind: str, **data: Any) -> None:
        Ledger(self.paths.root, f"attempt-{attempt:04d}-g01", clock=self.clock).append(Epoch(attempt, 1, 1), kind, data)


@pytest.fixture
def site(paths: RunPaths) -> Site:
    return Site(paths)


def test_the_first_look_launches_and_the_second_waits(site: Site) -> None:
    assert site.look() == "first-launch"
    intent = parse_intent(site.paths.intent(1).read_text())
    assert isinstance(intent, Intent) and intent.attempt == 1 and len(intent.nonce) >= 16
    assert site.look() == "attempt-alive" and site.launcher.launched == [1]
    kinds = [event.kind for event in read_all(site.paths.root)]
    assert kinds == ["decision", "attempt_intent", "attempt_submitted"]


def test_observing_changes_nothing(site: Site) -> None:
    before = sorted(path for path in site.paths.root.rglob("*"))
    result = reconcile_once(
        site.paths, launcher=site.launcher, policy=Policy(), clock=site.clock, by="me", observe_only=True
    )
    assert result.done.startswith("would launch") and sorted(site.paths.root.rglob("*")) == before


def test_an_attempt_that_left_no_word_is_recorded_and_followed(site: Site) -> None:
    site.look()
    site.launcher.alive = Liveness.DEAD
    assert site.look() == "next-attempt"
    assert site.launcher.launched == [1, 2]
    history = replay(read_all(site.paths.root))
    assert history.attempts[0].outcome == "lost"


def test_attempts_without_a_cycle_end_held_with_growing_pauses(site: Site) -> None:
    """R22 (metaseq#304, swiss-ai/Megatron-LM#44)."""
    site.launcher.alive = Liveness.DEAD
    rules = []
    for _ in range(40):
        rules.append(site.look())
        site.clock.sleep(300)
        if site.state() is RunState.HELD:
            break
    assert site.launcher.launched == [1, 2, 3, 4, 5] and rules[-1] == "crash-loop"
    # Looks of 300 s inside pauses of 30, 120 and 480 s: one, one and two; the second attempt follows at once.
    assert rules.count("backoff") == 4 and site.look() == "parked"


@pytest.mark.parametrize(
    ("outcome", "rule", "state"),
    [
        ("done", "training-complete", RunState.COMPLETED),
        ("drained", "drained", RunState.HELD),
        ("cancelled", "cancelled", RunState.HELD),
        ("held", "attempt-parked", RunState.HELD),
        ("failed", "attempt-parked", RunState.FAILED),
        ("continue", "next-attempt", RunState.LAUNCHING),
    ],
)
def test_what_follows_the_end_of_an_attempt(site: Site, outcome: str, rule: str, state: RunState) -> None:
    """R5 (Megatron-LM#1310)."""
    site.look()
    site.supervisor_says(1, "attempt_ended", outcome=outcome, reason="because", rule="r")
    site.launcher.alive = Liveness.DEAD
    assert (site.look(), site.state()) == (rule, state)


def test_resumed_lets_a_held_run_go_on(site: Site) -> None:
    site.look()
    site.supervisor_says(1, "attempt_ended", outcome="drained", reason="", rule="drained")
    site.launcher.alive = Liveness.DEAD
    assert site.look() == "drained"
    site.supervisor_says(1, "resumed", by="me")
    assert site.look() == "next-attempt" and site.launcher.launched == [1, 2]


def test_a_drain_without_a_live_attempt_holds_the_run_and_is_answered(site: Site) -> None:
    ulid = new_ulid(w.NOW)
    write_request(site.paths, make_request(Verb.DRAIN, by="me", now_unix=w.NOW), ulid=ulid)
    assert site.look() == "drained" and not site.launcher.launched
    assert ulid in replay(read_all(site.paths.root)).requests_done
    assert list(site.paths.control.iterdir()) == []


def test_two_controllers_launch_once(paths: RunPaths) -> None:
    sites = [Site(paths) for _ in range(4)]
    barrier = threading.Barrier(4)

    def go(site: Site) -> None:
        barrier.wait()
        reconcile_once(paths, launcher=site.launcher, policy=Policy(), clock=site.clock, by="me")

    threads = [threading.Thread(target=go, args=(site,)) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(site.launcher.launched) for site in sites) == 1


def test_a_controller_that_slept_between_look_and_act_changes_nothing(site: Site) -> None:
    look = observe_run(site.paths, launcher=site.launcher, clock=site.clock)
    decision = __import__("orchestrator.decide.decide", fromlist=["decide_run"]).decide_run(
        look.seen, look.history, Policy()
    )
    other = Site(site.paths)
    other.look()
    done = act.act(decision, look, paths=site.paths, launcher=site.launcher, clock=site.clock, by="me")
    assert "moved on" in done and not site.launcher.launched


def test_a_launcher_that_refuses_ends_the_attempt_and_says_why(site: Site) -> None:
    site.launcher.error = UsageError("slurm.partition: no such partition")
    with pytest.raises(UsageError, match="no such partition"):
        site.look()
    assert site.look() == "attempt-parked" and site.state() is RunState.FAILED
    history = replay(read_all(site.paths.root))
    assert history.parked is not None and "no such partition" in history.parked.reason


def test_killed_between_the_folder_and_the_intent_the_attempt_is_closed_and_the_next_runs(site: Site) -> None:
    make_attempt(site.paths, 1)
    site.launcher.alive = Liveness.PENDING
    site.clock.unix = site.paths.attempt(1).stat().st_mtime + 5
    assert site.look() == "launch-unclear" and not site.launcher.launched
    site.clock.sleep(60)
    site.look()
    assert replay(read_all(site.paths.root)).attempts[0].outcome == "lost"
    site.look()
    assert site.launcher.launched == [2]


@pytest.mark.parametrize("after", ["attempt_intent", "attempt_submitted"])
def test_killed_while_launching_the_attempt_is_never_doubled(
    site: Site, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Crash points: before the ledger knows the intent, and between the launch and its line.

    Case S13 (snakemake-executor-plugin-slurm#121).
    """
    real = Ledger.append

    def dying(self: Ledger, epoch: Epoch, kind: str, data: Any) -> Any:
        if kind == after:
            raise KeyboardInterrupt
        return real(self, epoch, kind, data)

    monkeypatch.setattr(Ledger, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        site.look()
    monkeypatch.setattr(Ledger, "append", real)
    started = list(site.launcher.launched)
    assert site.look() == "attempt-alive"
    assert site.launcher.launched == started and len(started) <= 1


def test_an_attempt_of_another_launcher_is_unknown(site: Site) -> None:
    site.look()
    site.launcher.kind = "slurm"
    assert site.look() == "attempt-unknown"


def test_an_unreadable_intent_is_unknown_not_dead(site: Site) -> None:
    site.look()
    site.paths.intent(1).write_text("{")
    site.launcher.alive = Liveness.DEAD
    assert site.look() == "attempt-unknown" and site.launcher.launched == [1]


def test_a_run_without_facts_waits_and_says_so(site: Site) -> None:
    site.paths.launch_facts.unlink()
    assert site.look() == "run-dir-unreadable"


def test_one_runs_trouble_stops_no_other(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    bad.config.chmod(0o666)
    launcher = w.FakeLauncher()
    results = reconcile_many(
        (bad, good), lambda _: Handling(launcher=launcher, policy=Policy()), clock=w.HandClock(), by="me"
    )
    assert isinstance(results[0].error, PawlError) and results[0].decision is None
    assert results[1].decision is not None and results[1].decision.action is Action.LAUNCH
    assert 1.0 <= recheck_after_s(results) <= 60.0


def test_watching_goes_on_until_told_to_stop(site: Site) -> None:
    rounds: list[str] = []
    watch(
        lambda: (site.paths,),
        lambda _: Handling(launcher=site.launcher, policy=Policy()),
        clock=site.clock,
        by="me",
        report=lambda results: rounds.append(results[0].done),
        stop=lambda: len(rounds) == 3,
    )
    assert len(rounds) == 3 and site.launcher.launched == [1] and site.clock.mono >= 3.0


def _claim(**more: Any) -> Claim:
    import os

    values: dict[str, Any] = {
        "nonce": "n",
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "start_ticks": own_start_ticks(),
        "boot_id": boot_id(),
        "created_unix": 1.0,
    }
    return Claim(**(values | more))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, Liveness.ALIVE),
        ({"start_ticks": 1}, Liveness.DEAD),
        ({"pid": 2**22 - 1}, Liveness.DEAD),
        ({"boot_id": "another"}, Liveness.DEAD),
        ({"host": "elsewhere"}, Liveness.UNKNOWN),
        ({"nonce": "abandoned-x"}, Liveness.DEAD),
    ],
)
def test_local_liveness_names_one_process_of_one_boot(more: dict[str, Any], expected: Liveness) -> None:
    intent = Intent(attempt=1, nonce="n", launcher="local", by="me", created_unix=1.0)
    assert local_liveness(intent, _claim(**more))[0] is expected
    assert local_liveness(intent, None)[0] is Liveness.PENDING


def test_requests_are_read_in_order_and_bad_ones_reported(paths: RunPaths) -> None:
    early, late = new_ulid(w.NOW), new_ulid(w.NOW + 1)
    assert early < late and len(early) == 26
    write_request(paths, make_request(Verb.SAVE_NOW, by="a", now_unix=w.NOW), ulid=late)
    write_request(paths, make_request(Verb.DRAIN, by="b", now_unix=w.NOW), ulid=early)
    (paths.control / "cancel-00000000").write_text("{")
    (paths.control / "drain-11111111").write_text(paths.request("save-now", late).read_text())
    found, problems = read_requests(paths)
    assert [request.id for request in found] == [early, late] and len(problems) == 2
    assert paths.request("drain", early).stat().st_mode & 0o777 == 0o600
    resumed = replay(w.Tape().add("resumed", by="me").events)
    assert open_requests(found, resumed) == ()
