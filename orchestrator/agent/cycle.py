"""One cycle on one node: torchrun and its ranks from start to the last process.

prepare   read and check cycle.json (in the I/O thread: the file system may stall)
start     new shared memory, torchrun in a session of its own, output to cycles/N/logs/<node>.log
look      read beats and process states, judge each rank
stop      evidence, then SIGKILL everything of this node by nonce until nothing is left (in the I/O thread)
"""

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import evidence, preflight, proc, shm
from orchestrator.agent.messages import FailedRank, Profile, Stopped, Verdict
from orchestrator.agent.plan import fill
from orchestrator.agent.watch import GONE, Durations, RankWatch, judge
from orchestrator.decide.observation import VerdictKind
from orchestrator.decide.policy import Policy
from orchestrator.errors import PawlError
from orchestrator.state.codec import dumps
from orchestrator.state.fsio import read_own
from orchestrator.state.records import Cycle, Unreadable, parse_cycle
from orchestrator.state.rundir import RunPaths, safe_name

_SUMMARY_EXIT = re.compile(r"rank\s*:\s*(\d+)\s*\(local_rank: \d+\)\s*\n[^\n]*exitcode\s*:\s*(-?\d+)")


class CycleRefused(PawlError):
    """This node cannot or will not run the cycle; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """The agent. `command` is torchrun's with placeholders; ranks outlive their agent by `supervisor_lost_s`."""

    paths: RunPaths
    attempt: int
    node: str
    nonce: str
    command: tuple[str, ...]
    policy: Policy
    env: Mapping[str, str]
    workdir: str | None
    supervisor_lost_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked cycle, ready to start on this node."""

    cycle: Cycle
    argv: tuple[str, ...]
    log: Path
    shm_path: Path
    first_rank: int


def read_trusted(path: Path) -> str:
    """The text of a file that only this user could have written (DESIGN §3, channel). Raises CycleRefused."""
    try:
        return read_own(path)
    except FileNotFoundError as error:
        raise CycleRefused(f"{path} cannot be read: there is no such file.") from error
    except PawlError as error:
        raise CycleRefused(str(error)) from error


def check_node(context: NodeContext, ranks_per_node: int) -> tuple[str | None, str | None]:
    """(defect, advice) of this node, after whatever an earlier agent left here was ended."""
    proc.kill_all(lambda: proc.find(nonce=context.nonce, node=context.node))
    facts = preflight.look(context.paths.root, nonce=context.nonce, node=context.node)
    return preflight.judge(facts, run_dir=context.paths.root), preflight.advice(facts, ranks_per_node=ranks_per_node)


def prepare(context: NodeContext, number: int) -> Prepared:
    """Read cycle `number` and turn it into this node's command. Raises CycleRefused with the reason."""
    path = context.paths.cycle_file(context.attempt, number)
    cycle = parse_cycle(read_trusted(path))
    if isinstance(cycle, Unreadable):
        raise CycleRefused(f"{path} cannot be used: {cycle.why}.")
    if (cycle.epoch.attempt, cycle.epoch.cycle, cycle.nonce) != (context.attempt, number, context.nonce):
        raise CycleRefused(f"{path} belongs to {cycle.epoch.text} of another launch than this agent's.")
    mine = next((node for node in cycle.nodes if node.name == context.node), None)
    if mine is None:
        raise CycleRefused(f"{path} does not name the node {context.node}.")
    if cycle.world_size != len(cycle.nodes) * cycle.ranks_per_node:
        raise CycleRefused(
            f"{path}: {len(cycle.nodes)} nodes × {cycle.ranks_per_node} ranks per node is not the world size "
            f"{cycle.world_size}."
        )
    defect, _ = check_node(context, cycle.ranks_per_node)
    if defect is not None:
        raise CycleRefused(f"{context.node} cannot train: {defect}")
    memory = shm.path_of(uid=os.getuid(), nonce=context.nonce, node=safe_name(context.node))
    values = {
        "nnodes": str(len(cycle.nodes)),
        "node_rank": str(mine.node_rank),
        "ranks_per_node": str(cycle.ranks_per_node),
        "master_addr": cycle.master_addr,
        "master_port": str(cycle.master_port),
        "cycle_file": str(path),
        "shm": str(memory),
    }
    return Prepared(
        cycle=cycle,
        argv=fill(context.command, values),
        log=context.paths.node_log(context.attempt, number, context.node),
        shm_path=memory,
        first_rank=mine.node_rank * cycle.ranks_per_node,
    )


class NodeCycle:
    """The running cycle. `look` and `code` are for the agent's loop; `stop` may run in another thread."""

    def __init__(self, context: NodeContext, prepared: Prepared, durations: Durations, *, now: float) -> None:
        """Start it. Raises CycleRefused when memory or process cannot be made."""
        self.prepared = prepared
        self.number = prepared.cycle.epoch.cycle
        self._context = context
        self._durations = durations
        try:
            self.memory = shm.NodeMemory.create(
                prepared.shm_path,
                num_ranks=prepared.cycle.ranks_per_node,
                agent_lost_s=context.supervisor_lost_s,
            )
        except OSError as error:
            raise CycleRefused(f"{prepared.shm_path} cannot be made: {error.strerror}.") from error
        ranks = range(prepared.cycle.ranks_per_node)
        self.watches = tuple(RankWatch(rank=prepared.first_rank + local, moved_at=now) for local in ranks)
        self.torchrun = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        context, prepared = self._context, self.prepared
        environment = {**os.environ, **context.env}
        environment |= {proc.NONCE_KEY: context.nonce, proc.NODE_KEY: context.node, "PYTHONSAFEPATH": "1"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        try:
            prepared.log.parent.mkdir(exist_ok=True)
            with prepared.log.open("ab") as log:
                return subprocess.Popen(
                    prepared.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=context.workdir,
                    start_new_session=True,
                )
        except OSError as error:
            raise CycleRefused(f"{prepared.argv[0]} cannot be started: {error}.") from error

    def code(self) -> int | None:
        """Exit code of torchrun, None while it runs."""
        return self.torchrun.poll()

    def look(self, now: float) -> tuple[Verdict, ...]:
        """Read all ranks; what is newly wrong with them."""
        verdicts = []
        for local, watch in enumerate(self.watches):
            beat = self.memory.read_beat(local)
            mine = beat if isinstance(beat, shm.Beat) and beat.epoch == self.prepared.cycle.epoch else None
            known = mine or watch.beat
            watch.observe(now, beat=mine, state=_state(known), durations=self._durations)
            verdict = judge(watch, now, policy=self._context.policy, durations=self._durations)
            if verdict is not None:
                verdicts.append(verdict)
        return tuple(verdicts)

    def milestone(self) -> tuple[bool, bool]:
        """(all ranks are past INIT, some rank has completed a step): what the supervisor times."""
        started = all(watch.beat is not None and watch.phase != "init" for watch in self.watches)
        stepped = any(watch.has_stepped for watch in self.watches)
        return started, stepped

    def ask_profile(self, order: Profile) -> None:
        """Pass a profile order on to the ranks."""
        wanted = {watch.rank for watch in self.watches} if order.ranks is None else set(order.ranks)
        local_ranks = [local for local, watch in enumerate(self.watches) if watch.rank in wanted]
        self.memory.write_profile(order.number, steps=order.steps, local_ranks=local_ranks)

    def forgive(self, seconds: float) -> None:
        """See RankWatch.forgive."""
        for watch in self.watches:
            watch.forgive(seconds)

    def failed(self) -> tuple[FailedRank, ...]:
        """What torchrun's summary says about its workers, from the end of the node's log."""
        return parse_summary("\n".join(evidence.last_lines(self.prepared.log)))

    def exits(self, now: float, failed: tuple[FailedRank, ...]) -> tuple[Verdict, ...]:
        """A verdict for each rank that torchrun saw fail, with its exit code; call it once torchrun has ended."""
        codes = {rank.rank: rank.exit_code for rank in failed}
        verdicts = []
        for watch in self.watches:
            code = codes.get(watch.rank)
            if code is not None and VerdictKind.EXITED not in watch.judged:
                watch.judged.add(VerdictKind.EXITED)
                verdicts.append(_exit_verdict(watch, code, now))
        return tuple(verdicts)

    def stop(self, *, with_evidence: bool, now: float) -> Stopped:
        """End everything of this node, saying what it was first if asked. Never raises for a full or lost disk."""
        started = time.monotonic()
        collected = evidence.Collected(ranks=(), files=())
        if with_evidence:
            collected = evidence.collect(self._suspects(now), pyspy=evidence.find_pyspy())
        killed = proc.kill_all(lambda: proc.find(nonce=self._context.nonce, node=self._context.node))
        files = list(collected.files)
        if with_evidence:
            files += self._write_evidence(collected)
        return Stopped(
            cycle=self.number,
            seconds=time.monotonic() - started,
            killed=killed.signalled,
            remaining=len(killed.remaining),
            evidence=tuple(self._context.paths.relative(file) for file in files),
            stopped_ranks=collected.stopped_ranks,
        )

    def _suspects(self, now: float) -> list[evidence.Suspect]:
        paths, attempt = self._context.paths, self._context.attempt
        return [
            evidence.Suspect(
                rank=watch.rank,
                pid=watch.beat.pid,
                phase=watch.phase,
                step=watch.step,
                collective_seq=watch.beat.collective_seq,
                quiet_s=now - watch.moved_at,
                stacks=paths.stacks(attempt, self.number, watch.rank),
            )
            for watch in self.watches
            if watch.beat is not None
        ]

    def _write_evidence(self, collected: evidence.Collected) -> list[Path]:
        context = self._context
        path = context.paths.evidence(context.attempt, self.number) / f"{safe_name(context.node)}.json"
        found = evidence.NodeEvidence(
            node=context.node,
            cycle=self.number,
            unix=time.time(),
            ranks=collected.ranks,
            last_lines=evidence.last_lines(self.prepared.log),
        )
        try:
            evidence.write(path, found)
        except OSError as error:
            # The kill is done and must be reported; a full disk is said where it can still be said.
            print(f"evidence {path} could not be written: {error}; {dumps(collected.ranks)}", flush=True)
            return []
        return [path]

    def close(self) -> None:
        """Give the memory back, after `stop`."""
        self.memory.unlink()
        self.memory.close()


def _exit_verdict(watch: RankWatch, code: int, now: float) -> Verdict:
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return Verdict(
        kind=VerdictKind.EXITED,
        rank=watch.rank,
        phase=watch.phase,
        step=watch.step,
        quiet_s=now - watch.moved_at,
        limit_s=None,
        message=f"rank {watch.rank} {how} in {watch.phase}",
        ago_s=0.0 if watch.gone_since is None else now - watch.gone_since,
        exit_code=code,
    )


def _state(beat: shm.Beat | None) -> str | None:
    if beat is None:
        return None
    process = proc.look(beat.pid)
    return GONE if process is None or process.is_dead else process.state


def parse_summary(text: str) -> tuple[FailedRank, ...]:
    """(rank, exit code) pairs of torchrun's failure summary; () when there is none."""
    found = {int(rank): int(code) for rank, code in _SUMMARY_EXIT.findall(text)}
    return tuple(FailedRank(rank=rank, exit_code=code) for rank, code in sorted(found.items()))
