"""The supervisor's hands: carry out a decision inside the allocation, and say in the ledger what happened.

    note      the ledger; a lost spare is not counted on any more
    start     cycle.json on disk → cycle_started → the word to the agents
    restart   evidence and SIGKILL on every node → incident, decision, teardown, cycle_ended → idle (back-off runs)
    drain     the word into the ranks' shared memory; they save at the step border and leave with 75
    profile   the order into the ranks' shared memory; they record the next steps and train on
    fetch     a copy of a checkpoint is brought back by a command beside (`beside.py`); the next scan sees it
    end …     the same clean-up, then the attempt's last word

After a restart nothing is remembered but the pause: the next cycle is started by the same rule as the first one.
"""

import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from orchestrator.agent.evidence import last_lines
from orchestrator.agent.messages import Control, Quit
from orchestrator.agent.plan import AttemptPlan
from orchestrator.decide.decision import Action, Decision, incident_data
from orchestrator.decide.observation import CopyState, Stage
from orchestrator.errors import PawlError
from orchestrator.state import gc
from orchestrator.state.copies import pushed_to
from orchestrator.state.counting import resume_step
from orchestrator.state.epochs import Epoch
from orchestrator.state.ledger import Ledger, read_all
from orchestrator.state.records import Request, Verb
from orchestrator.state.requests import acknowledge
from orchestrator.state.rundir import RunPaths
from orchestrator.state.train_lines import last_written_step
from orchestrator.supervise.beside import Beside
from orchestrator.supervise.edge import Edge
from orchestrator.supervise.hub import Hub
from orchestrator.supervise.keep import Keeper
from orchestrator.supervise.look import Lookout
from orchestrator.supervise.nodes import Nodes
from orchestrator.supervise.profiling import Profiling
from orchestrator.supervise.start import Teardown, end_cycle, new_epoch, send_start, write_cycle, write_nodes
from orchestrator.supervise.times import CycleTimes, Recovery, furthest_step


class Ended(Exception):
    """The attempt is over; `outcome` is its last word."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Actor:
    """Carries out decisions. `act` raises Ended when one ends the attempt."""

    def __init__(
        self,
        *,
        paths: RunPaths,
        plan: AttemptPlan,
        nodes: Nodes,
        hub: Hub,
        edge: Edge,
        ledger: Ledger,
        look: Lookout,
        pump: Callable[[float], None],
    ) -> None:
        self._paths, self._plan, self._policy = paths, plan, plan.policy
        self._nodes, self._hub, self._edge = nodes, hub, edge
        self._ledger, self._look, self._pump = ledger, look, pump
        events = read_all(paths.root)
        self._keeper = Keeper(paths, plan, events)
        copied = pushed_to(events, place=plan.copies.place(plan.run))
        self._beside = Beside(paths, plan.copies, attempt=plan.attempt, copied=copied)
        look.copies = CopyState.UNASKED if copied else CopyState.NONE
        self._profiling = Profiling(paths)
        self._epoch = Epoch(plan.attempt, 1, 0)
        self.agent_pids: Mapping[str, int] = {}
        self._used_ports: set[int] = set()
        self._not_before = 0.0
        self._times: CycleTimes | None = None
        self._recovery: Recovery | None = None
        self._num_incidents = 0
        self._taken = {event.data.get("id") for event in events if event.kind == "request"}
        look.learn(events)

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """A fact for the ledger, and for the next decision. Raises OSError."""
        self._look.learn([self._ledger.append(self._epoch, kind, data)])

    def act(self, decision: Decision) -> None:
        """Carry it out. Raises Ended, PawlError and OSError."""
        self._take_requests()
        match decision.action:
            case Action.WAIT:
                return
            case Action.NOTE:
                self.record("decision", decision.ledger_data())
                self._look.exclude(decision.exclude)
            case Action.START:
                self._start(decision)
            case Action.RESTART:
                self._restart(decision)
            case Action.DRAIN:
                self._say(decision, "drain")
                self._look.drain_sent = True
            case Action.SAVE:
                self._say(decision, "save")
                self._look.save_sent = True
            case Action.PROFILE:
                self._ask_profile(decision)
            case Action.FETCH:
                self.record("decision", decision.ledger_data())
                self._beside.stop()
                self._beside.fetch()
                self._look.copies = CopyState.FETCHING
            case Action.FINISH | Action.END | Action.HOLD | Action.FAIL | Action.CANCEL:
                self._end(decision)
            case _:
                raise PawlError(f"decision {decision.rule} asks for {decision.action}, which a controller must do")

    def publish_nodes(self, training: Collection[str]) -> None:
        """Write nodes.json: who trains, who is a spare. Raises OSError."""
        views = self._nodes.views.values()
        places = tuple((view.name, view.address) for view in views)
        write_nodes(self._paths, self._plan.attempt, places, training=training, agent_pids=self.agent_pids)

    def _take_requests(self) -> None:
        for request in self._look.requests:
            if request.id not in self._taken:
                self._taken.add(request.id)
                self.record("request", {"verb": str(request.verb), "id": request.id, "by": request.by})

    def _start(self, decision: Decision) -> None:
        if time.monotonic() < self._not_before:
            return
        # A checkpoint may have been completed while the cycle before was being ended.
        self._look.scan_now()
        newest = self._look.counting.newest
        resume_from = None if newest is None else newest.name
        epoch = new_epoch(self._paths, self._plan.attempt, 1, after=self._epoch.cycle)
        places = tuple((name, self._nodes.views[name].address) for name in decision.nodes)
        cycle = write_cycle(
            self._paths,
            self._plan,
            epoch,
            nodes=places,
            resume_from=resume_from,
            used_ports=self._used_ports,
        )
        self._epoch = epoch
        recovery = self._recovery
        if recovery is None:
            self.record("decision", decision.ledger_data())
        self.record(
            "cycle_started",
            {
                "nodes": list(decision.nodes),
                "spares": [name for name in self._nodes.views if name not in decision.nodes],
                "resume_from": resume_from,
                "world_size": self._plan.world_size,
                "incident": None if recovery is None else recovery.incident,
                "level": None if recovery is None else recovery.level,
            },
        )
        self._nodes.begin(epoch, decision.nodes)
        self.publish_nodes(decision.nodes)
        self._look.resume_from = resume_from
        self._look.drain_sent = self._look.save_sent = False
        self._times = CycleTimes(started_at=time.monotonic())
        self._look.enter(Stage.RUNNING)
        send_start(self._hub, cycle)

    def record_progress(self) -> None:
        """What can be seen without a decision: the first step, new checkpoints, metrics addresses, kept promises."""
        addresses = [
            f"{view.address}:{view.metrics_port}"
            for view in self._nodes.views.values()
            if view.metrics_port is not None and self._hub.connected(view.name)
        ]
        self._keeper.publish_targets(addresses)
        self._note_times()
        if self._profiling.is_done(self._nodes):
            self._answer_profile()
        self._run_errands()
        counting = self._look.counting
        new = self._keeper.new_commits(counting)
        for checkpoint in reversed(new):
            data = {"name": checkpoint.name, "step": checkpoint.step, "bytes": checkpoint.total_bytes}
            self.record("checkpoint_committed", data)
        if new:
            self._saved()
            if self._look.stage is Stage.RUNNING:
                busy = self._beside.busy_with
                in_use = frozenset() if busy is None else frozenset({busy})
                self._keeper.collect(self._epoch, resumed_from=self._look.resume_from, in_use=in_use)

    def _run_errands(self) -> None:
        """Copies and exports beside the training. A failure is a line in the ledger; training never waits."""
        found = self._beside.turn(self._look.counting)
        if found is None:
            return
        if found.code != 0:
            self.record("errand_failed", found.ledger_data())
        elif found.what == "push" and self._look.copies is CopyState.NONE:
            self._look.copies = CopyState.UNASKED
        if found.what == "pull":
            self._look.copies = CopyState.ASKED
            self._look.scan_now()

    def finish_errands(self, limit_s: float) -> None:
        """The run is done: its last copies and exports may still take this long, unless one fails or a signal comes."""
        deadline = time.monotonic() + limit_s
        while self._beside.is_running or self._beside.due(self._look.counting):
            if time.monotonic() > deadline or self._look.is_signalled or self._beside.is_pausing:
                break
            self._run_errands()
            time.sleep(0.2)
        self._beside.stop()

    def stop_errands(self) -> None:
        """Kill what runs beside; it goes on in the next attempt."""
        self._beside.stop()

    def _note_times(self) -> None:
        step, times = self._nodes.step, self._times
        resumed = resume_step(self._look.resume_from) or 0
        if times is None or self._look.stage is Stage.IDLE:
            return
        stepped = step is not None and step > resumed
        if not times.note(time.monotonic(), all_started=self._nodes.all_started, stepped=stepped):
            return
        start_s, load_s = times.start_s or 0.0, times.load_s or 0.0
        self.record("cycle_running", {"step": step, "start_s": round(start_s, 3), "load_s": round(load_s, 3)})
        if self._recovery is not None:
            self.record("recovered", self._recovery.data(times, resumed_step=resumed))
            self._recovery = None

    def _say(self, decision: Decision, word: str) -> None:
        self.record("decision", decision.ledger_data())
        for view in self._nodes.training:
            self._hub.send(view.name, Control(cycle=self._epoch.cycle, word=word))

    def _ask_profile(self, decision: Decision) -> None:
        request = next(request for request in self._look.requests if request.verb is Verb.PROFILE)
        self.record("decision", decision.ledger_data())
        order = self._profiling.order(request, self._epoch)
        for view in self._nodes.training:
            self._hub.send(view.name, order)
        self._look.profile_sent = True

    def _answer_profile(self) -> None:
        """Answer the profile under way with what lies in profile/; does nothing where there is none."""
        request = self._profiling.request
        if request is not None:
            found = self._profiling.close()
            self._acknowledge_one(request, result=found.result, where=found.where)
        self._look.profile_sent = False

    def _saved(self) -> None:
        if not self._look.save_sent:
            return
        self._look.save_sent = False
        self._acknowledge((Verb.SAVE_NOW,), result="saved")

    def _acknowledge(self, verbs: tuple[Verb, ...], *, result: str) -> None:
        for request in self._look.requests:
            if request.verb in verbs:
                self._acknowledge_one(request, result=result)

    def _acknowledge_one(self, request: Request, *, result: str, where: str | None = None) -> None:
        acknowledge(self._paths, self._ledger, self._epoch, request, result=result, where=where)
        self._look.learn(
            event
            for event in read_all(self._paths.root)
            if event.kind == "request_done" and event.data.get("id") == request.id
        )

    def _tear_down(self, decision: Decision, *, evidence: bool) -> Teardown | None:
        """End what runs and write it down; None when nothing ran."""
        if self._look.stage is Stage.IDLE:
            self.record("decision", decision.ledger_data())
            return None
        detected_at, detected_unix = time.monotonic(), time.time()
        found = end_cycle(
            self._nodes, self._hub, self._edge, evidence=evidence, pump=self._pump,
            silence_limit_s=self._policy.silence_limit_s,
        )  # fmt: skip
        reached = self._reached()
        if decision.fault is not None:
            self._incident(decision, found, detected_at=detected_at, detected_unix=detected_unix, reached=reached)
        self.record("decision", decision.ledger_data())
        self.record("teardown", {"seconds": round(found.seconds, 3), "orphans": found.orphans})
        self._answer_profile()
        how = str(decision.fault.cls) if decision.fault is not None else decision.outcome
        self.record("cycle_ended", {"outcome": how, "exit_code": self._exit_code(), "step": reached})
        self._times = None
        self._look.enter(Stage.IDLE)
        return found

    def _reached(self) -> int | None:
        """The last step that was completed: as beats told, or one more that only its line in train.jsonl tells of."""
        path = self._paths.train_log(self._epoch.attempt, self._epoch.cycle)
        known = [s for s in (self._nodes.step, last_written_step(last_lines(path))) if s is not None]
        return max(known, default=None)

    def _incident(
        self, decision: Decision, found: Teardown, *, detected_at: float, detected_unix: float, reached: int | None
    ) -> None:
        fault = decision.fault
        assert fault is not None
        self._num_incidents += 1
        name = f"{self._epoch.text}-{self._num_incidents}"
        data = incident_data(decision, incident_id=name)
        data["detected_unix"] = detected = min(fault.detected_unix or detected_unix, detected_unix)
        data["evidence"] = [*data["evidence"], *found.evidence]
        self.record("incident", data)
        detection = None if fault.fault_unix is None else max(0.0, detected - fault.fault_unix)
        self._recovery = Recovery(
            incident=name,
            cls=str(fault.cls),
            level=None if decision.level is None else str(decision.level),
            detection_s=detection,
            detected_at=detected_at - max(0.0, detected_unix - detected),
            backoff_s=decision.backoff_s,
            reached_step=furthest_step(reached, resumed=resume_step(self._look.resume_from)),
        )

    def _exit_code(self) -> int | None:
        outcomes = self._look.outcomes
        bad = [outcome.exit_code for outcome in outcomes if outcome.exit_code]
        launchers = [view.torchrun_exit for view in self._nodes.training if view.torchrun_exit]
        said = [0] if outcomes else []
        return next(iter((*bad, *launchers, *said)), None)

    def _restart(self, decision: Decision) -> None:
        found = self._tear_down(decision, evidence=True)
        leaving = set(decision.exclude)
        # A node with a process that SIGKILL cannot end must not be given the next cycle's ranks.
        leaving |= {view.name for view in self._nodes.training if view.answered and view.answered.remaining}
        leaving |= set(found.unanswered) if found is not None else set()
        self._look.exclude(sorted(leaving))
        if decision.quarantine is not None:
            gc.quarantine(self._paths, decision.quarantine, epoch=self._epoch)
            reason = decision.fault.message if decision.fault is not None else decision.reason
            self.record("checkpoint_quarantined", {"name": decision.quarantine, "reason": reason})
        self._not_before = time.monotonic() + decision.backoff_s
        self._look.scan_now()

    def _end(self, decision: Decision) -> None:
        outcome = decision.outcome or "continue"
        self._tear_down(decision, evidence=decision.fault is not None)
        self._look.scan_now()
        self.record_progress()
        newest = self._look.counting.newest
        word = {"rule": decision.rule, "reason": decision.reason, "hint": decision.hint}
        if decision.action is Action.FINISH:
            self.record("run_done", {"step": None if newest is None else newest.step})
        elif decision.action is Action.HOLD:
            self.record("run_held", word)
        elif decision.action is Action.FAIL:
            self.record("run_failed", word)
        verbs = {"drained": (Verb.DRAIN, Verb.SAVE_NOW, Verb.PROFILE), "cancelled": tuple(Verb), "done": tuple(Verb)}
        self._acknowledge(verbs.get(outcome, ()), result=outcome)
        self.record("attempt_ended", {"outcome": outcome, "reason": decision.reason, "rule": decision.rule})
        raise Ended(outcome)

    def record_failure(self, reason: str) -> None:
        """The supervisor itself cannot go on: the attempt is lost. A ledger that takes nothing is said on stderr."""
        try:
            self.record("attempt_ended", {"outcome": "lost", "reason": reason, "rule": "supervisor-error"})
        except OSError as error:
            print(f"supervisor: the ledger does not take the attempt's end: {error}", file=sys.stderr, flush=True)

    def quit_agents(self) -> None:
        """The attempt is over: every agent cleans up its node and leaves."""
        for name in self._nodes.views:
            self._hub.send(name, Quit(why="the attempt is over"))

    def clear_targets(self) -> None:
        """Nothing is served any more. Raises OSError."""
        self._keeper.publish_targets([])
