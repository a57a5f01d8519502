"""The supervisor: one per attempt, inside the allocation; it runs cycles until the run is done or must leave.

    claim the attempt ─▶ agents on all nodes ─▶ ┌ look ─▶ assess ─▶ decide ─▶ act ┐ ─▶ attempt_ended ─▶ exit code
                                                └──────── until decide ends it ───┘

`look` sees, the pure `decide` decides, `act` acts. Agents are heard in the hub's thread, the run
directory is read in the I/O thread; this loop waits for neither while ranks train.
"""

import argparse
import os
import queue
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from orchestrator.agent import proc
from orchestrator.agent.cycle import CycleRefused, read_trusted
from orchestrator.agent.messages import Hello
from orchestrator.agent.plan import AttemptPlan, parse_plan
from orchestrator.decide.observation import Stage
from orchestrator.errors import PawlError
from orchestrator.state import fsio
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.history import RunState, replay
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.presence import Presence, RunDirGone, look_for
from orchestrator.state.records import (
    Claim,
    Intent,
    LaunchFacts,
    Unreadable,
    parse_intent,
    parse_launch_facts,
)
from orchestrator.state.rundir import RunPaths, check_owner, supervisor_writer
from orchestrator.supervise import channel
from orchestrator.supervise.act import Actor, Ended
from orchestrator.supervise.edge import Edge, LocalEdge, SlurmEdge
from orchestrator.supervise.hub import Hub
from orchestrator.supervise.look import Lookout
from orchestrator.supervise.nodes import Nodes
from orchestrator.supervise.start import answer_hello

GENERATION = 1
LAST_ERRANDS_S = 600.0
EXIT_CODES = {"done": 0, "drained": 0, "continue": 0, "cancelled": 0, "held": 3, "failed": 1}


class Supervisor:
    """The loop. `run` returns how the attempt ended."""

    def __init__(
        self,
        *,
        paths: RunPaths,
        plan: AttemptPlan,
        exclude: tuple[str, ...],
        facts: LaunchFacts,
        edge: Edge,
        key: bytes,
    ) -> None:
        self._paths, self._plan, self._edge = paths, plan, edge
        policy = plan.policy
        names = frozenset(node.name for node in edge.nodes)
        self._hub = Hub(
            host="127.0.0.1" if plan.launcher == "local" else "",
            key=key,
            attempt=plan.attempt,
            nodes=names,
            beat_interval_s=policy.beat_interval_s,
        )
        self._nodes = Nodes(edge.nodes)
        self._epoch0 = Epoch(plan.attempt, GENERATION, 0)
        ledger = Ledger(paths.root, supervisor_writer(self._epoch0))
        self._look = Lookout(
            paths=paths, plan=plan, facts=facts, nodes=self._nodes, hub=self._hub, edge=edge, exclude=exclude
        )
        self._actor = Actor(
            paths=paths, plan=plan, nodes=self._nodes, hub=self._hub, edge=edge, ledger=ledger, look=self._look,
            pump=self._pump,
        )  # fmt: skip
        self._tick_s = min(0.2, policy.beat_interval_s / 5)

    def note_signal(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler: remember the notice, nothing else."""
        self._look.note_signal(signal.Signals(number).name)

    def run(self) -> str:
        """Until a decision ends the attempt; everything of it is gone then. Raises PawlError and OSError."""
        outcome = None
        self._begin()
        try:
            while True:
                self._pump(self._tick_s)
                if not self._look.refresh():
                    continue
                self._actor.record_progress()
                try:
                    self._actor.act(self._look.decide())
                except Ended as ended:
                    outcome = ended.outcome
                    return outcome
        except RunDirGone:
            raise
        except (PawlError, OSError) as error:
            if isinstance(error, OSError) and look_for(self._paths, self._plan.attempt) is Presence.GONE:
                raise RunDirGone(self._paths, self._plan.attempt) from error
            # No port, a full disk …: said where the controller looks, which decides whether to try again.
            self._actor.record_failure(str(error))
            raise
        finally:
            self._actor.quit_agents()
            self._hub.stop()
            self._edge.close()
            if look_for(self._paths, self._plan.attempt) is not Presence.GONE:
                self._actor.clear_targets()
                if outcome == "done":
                    self._actor.finish_errands(LAST_ERRANDS_S)
            self._actor.stop_errands()

    def _begin(self) -> None:
        self._hub.start()
        nodes = [{"name": node.name, "address": node.address} for node in self._edge.nodes]
        self._actor.record(
            "attempt_started",
            {"nonce": self._plan.nonce, "host": socket.gethostname(), "pid": os.getpid(), "nodes": nodes},
        )
        self._actor.agent_pids = self._edge.start_agents(port=self._hub.port)
        self._actor.publish_nodes([node.name for node in self._edge.nodes[: self._plan.num_nodes]])

    def _pump(self, seconds: float) -> None:
        """Wait for messages for at most `seconds`, and take in all that are there. Raises PawlError without a hub."""
        self._hub.check()
        try:
            heard = self._hub.inbox.get(timeout=seconds)
        except queue.Empty:
            return
        now_unix = time.time()
        while True:
            self._nodes.take(heard, now_unix=now_unix)
            if isinstance(heard.message, Hello):
                running = self._look.stage is not Stage.IDLE
                answer_hello(self._nodes, self._hub, heard.node, heard.message, running=running)
            self._look.woken_by(heard)
            try:
                heard = self._hub.inbox.get_nowait()
            except queue.Empty:
                return


def _parse(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(prog="python -m orchestrator supervise", description="Supervise an attempt.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--launcher", choices=("local", "slurm"), required=True)
    return parser.parse_args(own), tuple(command)


def claim_attempt(paths: RunPaths, attempt: int, *, nonce: str) -> bool:
    """Take the attempt for this process; False when another process has it. Raises OSError."""
    record = Claim(
        nonce=nonce,
        host=os.uname().nodename,
        pid=os.getpid(),
        start_ticks=proc.own_start_ticks(),
        boot_id=proc.boot_id(),
        job_id=os.environ.get("SLURM_JOB_ID"),
        created_unix=time.time(),
    )
    return fsio.claim(paths.claim(attempt), dumps(record) + "\n")


def _read(paths: RunPaths, attempt: int) -> tuple[Intent, AttemptPlan, LaunchFacts]:
    """What the attempt rests on. Raises PawlError naming the file that cannot be used."""
    check_owner(paths)
    plan_file = paths.attempt(attempt) / "plan.json"
    found: list[object] = []
    for path, parse in (
        (paths.intent(attempt), parse_intent),
        (plan_file, parse_plan),
        (paths.launch_facts, parse_launch_facts),
    ):
        record = parse(read_trusted(path))
        if isinstance(record, Unreadable):
            raise PawlError(f"{path} cannot be used: {record.why}.")
        found.append(record)
    intent, plan, facts = found
    assert isinstance(intent, Intent) and isinstance(plan, AttemptPlan) and isinstance(facts, LaunchFacts)
    if plan.nonce != intent.nonce or plan.attempt != attempt:
        raise PawlError(f"{plan_file} belongs to another launch than {paths.intent(attempt)}: their nonces differ.")
    return intent, plan, facts


def _over(paths: RunPaths) -> str | None:
    """Why no attempt may run any more: a queued successor of a finished or parked run ends here."""
    history = replay(read_all(paths.root))
    if history.state in (RunState.COMPLETED, RunState.HELD, RunState.FAILED):
        why = history.parked.reason if history.parked is not None else "the last step is trained"
        return f"the run is {history.state}: {why}"
    return None


def main(argv: list[str]) -> int:
    """`python -m orchestrator supervise … -- torchrun …`; the exit code."""
    options, command = _parse(argv)
    paths = RunPaths(options.run_dir.absolute())
    try:
        return _supervise(paths, options.attempt, options.launcher, command)
    except (PawlError, CycleRefused, OSError) as error:
        print(f"supervisor: {error}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 1)


def _supervise(paths: RunPaths, attempt: int, launcher: str, command: tuple[str, ...]) -> int:
    intent, plan, facts = _read(paths, attempt)
    over = _over(paths)
    if over is not None:
        print(f"supervisor: nothing to do, {over}", flush=True)
        return 0
    os.environ[proc.NONCE_KEY] = plan.nonce
    if not claim_attempt(paths, attempt, nonce=plan.nonce):
        print(f"supervisor: attempt {attempt} is run by another process; leaving.", flush=True)
        return 0
    proc.become_subreaper()
    edge: Edge
    if launcher == "local":
        edge = LocalEdge(paths, plan, command)
    else:
        edge = SlurmEdge(paths, plan, command, environ=os.environ)
    supervisor = Supervisor(
        paths=paths,
        plan=plan,
        exclude=() if launcher == "local" else intent.exclude,
        facts=facts,
        edge=edge,
        key=channel.create_key(paths.channel_key(attempt)),
    )
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, supervisor.note_signal)
    outcome = supervisor.run()
    print(f"supervisor: attempt {attempt} ended: {outcome}", flush=True)
    return EXIT_CODES.get(outcome, 1)
