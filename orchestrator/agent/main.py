"""The agent: one per node and attempt, alive over all cycles, parent of torchrun.

    supervisor ──Start(7)──▶ read cycles/0007/cycle.json, check it, new shared memory, start torchrun
               ◀──Report──── every beat: ranks' phases and steps, what is wrong with whom
               ──Stop──────▶ stacks first, then SIGKILL everything of this node by nonce
               ──Quit──────▶ the same without stacks, then exit

It obeys one supervisor and decides nothing by itself, with one exception: when it has not heard from the supervisor for
30 s it stops its ranks, with evidence, and exits, because ranks that nobody watches would hold the node for ever. It
owns the signals: USR2 and TERM are passed up as a notice, never down to torchrun (which would kill its workers).
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType

from orchestrator.agent import proc, shm
from orchestrator.agent import record as agent_record
from orchestrator.agent.args import Setup, read_setup
from orchestrator.agent.cycle import CycleRefused, NodeContext, NodeCycle, Prepared, check_node, prepare
from orchestrator.agent.io import Worker
from orchestrator.agent.messages import (
    Alive,
    Control,
    Exited,
    Hello,
    Message,
    Profile,
    Quit,
    RankReport,
    Refused,
    Report,
    Start,
    Stop,
    Stopped,
    Verdict,
    from_wire,
    to_wire,
)
from orchestrator.agent.plan import poll_s
from orchestrator.agent.stats import StatsKeeper, rank_reports
from orchestrator.agent.watch import Durations
from orchestrator.errors import PawlError
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import read_text
from orchestrator.state.presence import Presence, RunDirGone, Vanishing, look_for
from orchestrator.state.records import Unreadable, parse_intent
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise import channel

RECORD_EVERY_S = 10.0
RECONNECT_EVERY_S = 0.5
LOST_SUPERVISOR, LOST_RUN_DIR = 3, 4


class Agent:
    """The agent's loop. `run` returns the exit code: 0 after Quit, 3 without supervisor, 4 without run directory."""

    def __init__(self, setup: Setup) -> None:
        self._plan, self._context = setup.plan, setup.context
        self._policy = setup.plan.policy
        self._address, self._key = setup.address, setup.key
        self._connection: channel.Connection | None = None
        self._next_connect = 0.0
        self._cycle: NodeCycle | None = None
        self._cycle_number = 0
        self._exit_said = False
        self._milestone = (False, False)
        self._stopping: Stop | None = None
        self._called_off = 0
        self._durations = Durations()
        self.stats = StatsKeeper()
        self._jobs, self._floor = Worker("agent-jobs"), Worker("agent-record")
        self._verdicts: list[Verdict] = []
        self._signal: str | None = None
        self._record_seq = 0
        self._quit: str | None = None
        self._vanishing, self._is_gone = Vanishing(), False
        self._defect: str | None = None
        self.metrics_port: int | None = None
        now = time.monotonic()
        self._heard = self._looked = self._boot = now
        self._next_report = self._next_record = now
        self._late = False

    def note_signal(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler: remember it for the next report, nothing else."""
        self._signal = signal.Signals(number).name

    def run(self) -> int:
        """Until Quit or until the supervisor is lost; nothing of this node runs afterwards."""
        shm.remove_left(uid=os.getuid(), nonces=_earlier_nonces(self._context.paths, self._context.attempt))
        self._defect, advice = check_node(self._context, self._plan.ranks_per_node)
        self._jobs.submit("metrics", self._serve_metrics)
        for remark in filter(None, (self._defect, advice)):
            print(f"agent {self._context.node}: {remark}", flush=True)
        try:
            return self._loop()
        finally:
            # Also after an error of the agent's own: ranks without an agent would hold the node for ever.
            self._leave()

    def _loop(self) -> int:
        while self._quit is None:
            channel.wait(self._connection, timeout_s=poll_s(self._policy))
            now = time.monotonic()
            self._notice_lateness(now)
            self._talk(now)
            self._finish_jobs(now)
            self._watch(now)
            if now >= self._next_report:
                self._report(now)
            if self._is_gone:
                print(
                    f"agent {self._context.node}: {RunDirGone(self._context.paths, self._context.attempt)}",
                    file=sys.stderr,
                    flush=True,
                )
                return LOST_RUN_DIR
            if now - self._heard > self._plan.supervisor_lost_s:
                return self._orphaned(now)
        return 0

    def _serve_metrics(self) -> int:
        # In the worker's thread and only now: the client library must not delay the first beat.
        from orchestrator.metrics.exporter import serve
        from orchestrator.metrics.table import node_samples

        labels = {"run": self._plan.run, "node": self._context.node}
        host = "127.0.0.1" if self._plan.launcher == "local" else ""
        return serve(
            lambda: node_samples(self.stats.blocks(), labels, monotonic_ns=time.monotonic_ns()),
            host=host,
            port=self._plan.agent_port,
        ).port

    def _notice_lateness(self, now: float) -> None:
        gap, self._looked = now - self._looked, now
        self._late = gap > self._policy.late_intervals * self._policy.beat_interval_s
        if self._late and self._cycle is not None:
            self._cycle.forgive(gap)

    def _talk(self, now: float) -> None:
        if self._connection is None or self._connection.closed is not None:
            self._connect(now)
        if self._connection is None:
            return
        for body in self._connection.receive():
            self._heard = now
            message = from_wire(body)
            if isinstance(message, Unreadable):
                print(f"agent {self._context.node}: message ignored: {message.why}", flush=True)
            else:
                self._obey(message, now)
        if self._connection.closed is not None:
            print(f"agent {self._context.node}: connection ended: {self._connection.closed}", flush=True)

    def _connect(self, now: float) -> None:
        if now < self._next_connect:
            return
        self._next_connect = now + RECONNECT_EVERY_S
        try:
            self._connection = channel.connect(self._address, key=self._key, timeout_s=RECONNECT_EVERY_S)
        except OSError as error:
            self._connection = None
            print(f"agent {self._context.node}: no supervisor at {self._address}: {error}", flush=True)
            return
        self._say(
            Hello(
                node=self._context.node,
                pid=os.getpid(),
                attempt=self._context.attempt,
                cycle=self._cycle_number if self._cycle is not None else 0,
                defect=self._defect,
            )
        )
        self._next_report = now
        # What was said into a connection that broke may not have arrived.
        self._exit_said = False

    def _say(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(to_wire(message))

    def _obey(self, message: Message, now: float) -> None:
        match message:
            case Start():
                self._begin(message.cycle)
            case Control() if self._cycle is not None and message.cycle == self._cycle.number:
                self._cycle.memory.write_control(shm.ControlWord[message.word.upper()])
            case Profile() if self._cycle is not None and message.cycle == self._cycle.number:
                self._cycle.ask_profile(message)
            case Stop():
                self._stop(message, now)
            case Quit():
                self._quit = message.why
            case Alive():
                return
            case _:
                print(f"agent {self._context.node}: {type(message).__name__} does not fit now; ignored", flush=True)

    def _begin(self, number: int) -> None:
        if number <= self._cycle_number:
            return  # a repeated order: the first one may have been lost with its connection
        if self._cycle is not None or self._stopping is not None:
            self._say(Refused(cycle=number, why=f"cycle {self._cycle_number} still runs on {self._context.node}"))
            return
        self._cycle_number = number
        self._jobs.submit("prepare", lambda: prepare(self._context, number))

    def _stop(self, order: Stop, now: float) -> None:
        if self._stopping is not None:
            return
        cycle = self._cycle
        if cycle is None or order.cycle != cycle.number:
            # Its start may still be waiting for the file system: it must not come up after this answer.
            self._called_off = max(self._called_off, order.cycle)
            self._say(Stopped(cycle=order.cycle, seconds=0.0, killed=0, remaining=0))
            return
        self._stopping = order
        self._jobs.submit("stop", lambda: cycle.stop(with_evidence=order.evidence, now=now))

    def _finish_jobs(self, now: float) -> None:
        for result in self._floor.results():
            # A record that could not be written proves nothing: the file system may only be slow or full.
            found = Presence.UNKNOWN if result.error is not None else result.value
            self._is_gone = self._is_gone or self._vanishing.note(found, now)
        for result in self._jobs.results():
            if result.name == "metrics" and result.error is not None:
                print(f"agent {self._context.node}: no /metrics here: {result.error}", flush=True)
            elif isinstance(result.error, PawlError | OSError):
                self._say(Refused(cycle=self._cycle_number, why=str(result.error)))
            elif result.error is not None:
                raise result.error
            elif result.name == "metrics":
                self.metrics_port = result.value
            elif isinstance(result.value, Prepared):
                self._start(result.value, now)
            elif isinstance(result.value, Stopped):
                self._close_cycle()
                self._say(result.value)

    def _start(self, prepared: Prepared, now: float) -> None:
        if prepared.cycle.epoch.cycle <= self._called_off:
            return
        try:
            self._cycle = NodeCycle(self._context, prepared, self._durations, now=now)
        except CycleRefused as error:
            self._say(Refused(cycle=prepared.cycle.epoch.cycle, why=str(error)))
            return
        self._exit_said = False
        self._milestone = (False, False)
        self._verdicts = []
        self._next_report = now

    def _close_cycle(self) -> None:
        cycle, self._cycle, self._stopping = self._cycle, None, None
        if cycle is not None:
            cycle.code()
            self.stats.close()
            cycle.close()
        proc.reap()

    def _watch(self, now: float) -> None:
        cycle = self._cycle
        if cycle is None:
            return
        if self._stopping is None:
            if not self._late and (found := cycle.look(now)):
                self._verdicts += found
                self._next_report = now
            if cycle.milestone() != self._milestone:
                self._milestone = cycle.milestone()
                self._next_report = now
            self.stats.look(cycle.memory, cycle.prepared.cycle.epoch)
            proc.reap(frozenset({cycle.torchrun.pid}))
        code = cycle.code()
        if code is not None and self._stopping is None and not self._exit_said:
            self._exit_said = True
            failed = cycle.failed() if code else ()
            self._verdicts += cycle.exits(now, failed)
            self._report(now)
            self._say(Exited(cycle=cycle.number, code=code, failed=failed))

    def _report(self, now: float) -> None:
        self._next_report = now + self._policy.beat_interval_s
        cycle = self._cycle
        running = cycle is not None and cycle.code() is None
        ranks = () if cycle is None else rank_reports(cycle, self.stats, self._policy, now)
        self._say(
            Report(
                cycle=0 if cycle is None else cycle.number,
                running=running,
                ranks=ranks,
                verdicts=tuple(self._verdicts),
                p99_s=self._durations.all_p99_s(),
                signal=self._signal,
                late=self._late,
                metrics_port=self.metrics_port,
            )
        )
        if now >= self._next_record and self._floor.pending == 0:
            self._next_record = now + min(RECORD_EVERY_S, 2 * self._policy.beat_interval_s)
            self._record(ranks, running)

    def _record(self, ranks: tuple[RankReport, ...], running: bool) -> None:
        self._record_seq += 1
        record = agent_record.NodeRecord(
            seq=self._record_seq,
            node=self._context.node,
            host=socket.gethostname(),
            agent_pid=os.getpid(),
            epoch=Epoch(self._context.attempt, 1, self._cycle_number),
            unix=time.time(),
            running=running,
            ranks=tuple(_place(rank) for rank in ranks),
        )
        self._floor.submit("record", lambda: _write_floor(self._context, record))

    def _orphaned(self, now: float) -> int:
        print(
            f"agent {self._context.node}: no word from the supervisor for {now - self._heard:.1f} s; "
            "stopping the ranks of this node with evidence and leaving.",
            flush=True,
        )
        if self._cycle is not None:
            self._cycle.stop(with_evidence=True, now=now)
        return LOST_SUPERVISOR

    def _leave(self) -> None:
        proc.kill_all(lambda: proc.find(nonce=self._context.nonce, node=self._context.node))
        self._close_cycle()
        if self._connection is not None:
            self._connection.close("the agent leaves")


def _earlier_nonces(paths: RunPaths, attempt: int) -> Iterator[str]:
    """The nonces of the attempts before this one; they are over, or this one would not have been launched."""
    for number in range(1, attempt):
        intent = parse_intent(read_text(paths.intent(number)))
        if not isinstance(intent, Unreadable):
            yield intent.nonce


def _write_floor(context: NodeContext, record: agent_record.NodeRecord) -> Presence:
    presence = look_for(context.paths, context.attempt)
    if presence is Presence.HERE:
        agent_record.write_record(context.paths.beat(context.attempt, context.node), record)
    return presence


def _place(rank: RankReport) -> agent_record.RankPlace:
    quiet_s = round(rank.quiet_s, 2)
    return agent_record.RankPlace(rank=rank.rank, pid=rank.pid, phase=rank.phase, step=rank.step, quiet_s=quiet_s)


def main(argv: list[str]) -> int:
    """`python -m orchestrator agent …`; the exit code."""
    try:
        agent = Agent(read_setup(argv))
        proc.become_subreaper()
    except (PawlError, OSError) as error:
        print(f"agent: {error}", file=sys.stderr, flush=True)
        return 1
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, agent.note_signal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return agent.run()
