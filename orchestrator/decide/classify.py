"""Why a cycle cannot go on: one look → Fault, or None when nothing is wrong. Pure.

Evidence in this order: outcome files, dead nodes, agents' verdicts, standstill, log signatures, a bare exit. Within one
kind the earliest counts. When one rank dies, its peers fail in their collectives a moment later and say so louder; such
echoes (*cascades*) are never a cause. While only echoes are known, the fault is marked `cascade_only`, and decide waits
a moment for the cause.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.decide.decision import Fault
from orchestrator.decide.health import Health, RankHealth, RankState
from orchestrator.decide.observation import (
    AgentVerdict,
    CycleObservation,
    NodeObservation,
    Stage,
    VerdictKind,
)
from orchestrator.decide.signatures import CODE, CODE_TYPES, EXIT_CODES, SIGNATURES, is_cascade, normalise
from orchestrator.decide.taxonomy import FailureClass
from orchestrator.state.counting import resume_step
from orchestrator.state.records import Outcome, OutcomeKind

_KINDS: dict[OutcomeKind, FailureClass] = {
    OutcomeKind.CONFIG_ERROR: FailureClass.CONFIG,
    OutcomeKind.NONFINITE: FailureClass.NONFINITE,
    OutcomeKind.SPIKE: FailureClass.LOSS_SPIKE,
    OutcomeKind.DATA_ERROR: FailureClass.DATA_ERROR,
    OutcomeKind.CHECKPOINT_INVALID: FailureClass.CHECKPOINT_INVALID,
    OutcomeKind.DESYNC: FailureClass.DESYNC,
    OutcomeKind.HANG: FailureClass.HANG_COLLECTIVE,
}
_WELL = (OutcomeKind.DONE, OutcomeKind.DRAINED)
_TERMINATED = (-15, 143)  # torchrun ends the siblings of a failed worker with SIGTERM


def fingerprint(cls: FailureClass, signature: str, entity: object) -> str:
    """class | signature | entity: what makes two incidents the same one again."""
    return f"{cls}|{normalise(signature)}|{entity if entity is not None else '-'}"


def classify(seen: CycleObservation, health: Health, *, ever_stepped: bool) -> Fault | None:
    """The fault of the running or ended cycle. `ever_stepped`: some launch of this run completed a step before."""
    if seen.stage is Stage.IDLE:
        return None
    outcomes = sorted((o for o in seen.outcomes if o.epoch == seen.epoch), key=lambda o: o.written_unix)
    sources: tuple[Callable[[], Fault | None], ...] = (
        lambda: _spoken(seen, outcomes, ever_stepped),
        lambda: _dead_node(seen, health),
        lambda: _ended_rank(seen, outcomes, ever_stepped),
        lambda: _standstill(seen, health, outcomes),
        lambda: _log(seen, ever_stepped),
        lambda: _bare_end(seen, outcomes, ever_stepped),
    )
    fault = next((found for source in sources if (found := source()) is not None), None)
    if fault is None:
        return None
    return replace(fault, must_leave=tuple(dict.fromkeys((*fault.must_leave, *_must_leave(seen, health)))))


def _must_leave(seen: CycleObservation, health: Health) -> tuple[str, ...]:
    training = {node.name for node in seen.training}
    return tuple(node.name for node in health.dead_nodes if node.name in training)


def _spoken(seen: CycleObservation, outcomes: list[Outcome], ever_stepped: bool) -> Fault | None:
    """Outcomes that name their class themselves: no echo ever does."""
    for outcome in outcomes:
        cls = _KINDS.get(outcome.kind)
        if cls is None and outcome.kind is OutcomeKind.CRASHED:
            cls = EXIT_CODES.get(outcome.exit_code)
        if cls is not None:
            return _of_outcome(seen, outcome, cls)
    return None


def _of_outcome(seen: CycleObservation, outcome: Outcome, cls: FailureClass) -> Fault:
    if cls is FailureClass.DESYNC:
        return _of_desync(seen, outcome)
    where = outcome.exception.frame if outcome.exception else None
    signature = f"{outcome.exception.type} {where or ''}" if outcome.exception else outcome.message
    entity: object = where
    bad = None
    if cls is FailureClass.DATA_ERROR:
        entity = outcome.bad_file or f"step {outcome.step}"
    elif cls in (FailureClass.NONFINITE, FailureClass.LOSS_SPIKE):
        signature, entity = "", f"step {outcome.step}"
    elif cls is FailureClass.CHECKPOINT_INVALID:
        bad = outcome.checkpoint or seen.resume_from
        entity = bad
    return Fault(
        cls=cls,
        message=_sentence(outcome),
        fingerprint=fingerprint(cls, signature, entity),
        node=outcome.node or _node_of(seen, outcome.rank),
        rank=outcome.rank,
        phase=outcome.phase,
        step=outcome.step,
        fault_unix=outcome.written_unix,
        bad_checkpoint=bad,
    )


def _of_desync(seen: CycleObservation, outcome: Outcome) -> Fault:
    """All ranks found it, so who says it first means nothing: only the nodes of the suspects are named, and leave."""
    found = (_node_of(seen, rank) for rank in outcome.suspects)
    nodes = tuple(dict.fromkeys(node for node in found if node is not None))
    return Fault(
        cls=FailureClass.DESYNC,
        message=_sentence(outcome),
        fingerprint=fingerprint(FailureClass.DESYNC, "", ", ".join(nodes) or None),
        node=nodes[0] if nodes else None,
        rank=outcome.suspects[0] if outcome.suspects else None,
        phase=outcome.phase,
        step=outcome.step,
        fault_unix=outcome.written_unix,
        must_leave=nodes,
    )


def _node_of(seen: CycleObservation, rank: int) -> str | None:
    return next((found.node for found in seen.ranks if found.rank == rank), None)


def _sentence(outcome: Outcome) -> str:
    if outcome.exception is None or outcome.exception.message in outcome.message:
        return outcome.message or f"{outcome.kind}, exit code {outcome.exit_code}"
    return f"{outcome.exception.type}: {outcome.exception.message}"


def _dead_node(seen: CycleObservation, health: Health) -> Fault | None:
    training = {node.name for node in seen.training}
    dead = [node for node in health.dead_nodes if node.name in training]
    if not dead:
        return None
    # The one that fell silent first; hard evidence (no silence known) before silence.
    first = max(dead, key=lambda node: float("inf") if node.silence_s is None else node.silence_s)
    others = f"; also dead: {', '.join(n.name for n in dead if n is not first)}" if len(dead) > 1 else ""
    ranks = [rank for rank in seen.ranks if rank.node == first.name and rank.epoch == seen.epoch]
    return Fault(
        cls=FailureClass.NODE_DOWN,
        message=f"node {first.name}: {first.why}{others}",
        fingerprint=fingerprint(FailureClass.NODE_DOWN, "", first.name),
        node=first.name,
        phase=ranks[0].phase if ranks else None,
        step=ranks[0].step if ranks else None,
        fault_unix=None if first.silence_s is None else seen.now_unix - first.silence_s,
    )


def _ended_rank(seen: CycleObservation, outcomes: list[Outcome], ever_stepped: bool) -> Fault | None:
    """An agent's finding or a rank's exception, whichever is older; hardware and memory explain both."""
    verdict, crashed = _verdict(seen, outcomes), _crashed(seen, outcomes, ever_stepped)
    if verdict is None or crashed is None:
        return verdict or crashed
    if verdict.cls in (FailureClass.HOST_OOM, FailureClass.GPU_HW):
        return verdict
    unknown = float("inf")
    found_unix = verdict.fault_unix or verdict.detected_unix or unknown
    return verdict if found_unix < (crashed.fault_unix or unknown) else crashed


_VERDICT_CLASS = {
    VerdictKind.EXITED: FailureClass.RANK_CRASH,
    VerdictKind.STOPPED: FailureClass.HANG_LOCAL,
    VerdictKind.OUT_OF_MEMORY: FailureClass.HOST_OOM,
    VerdictKind.GPU: FailureClass.GPU_HW,
    VerdictKind.PREFLIGHT: FailureClass.START_FAIL,
}


def _verdict(seen: CycleObservation, outcomes: list[Outcome]) -> Fault | None:
    """The earliest finding of an agent that is a cause; a rank that left an outcome is judged by that."""
    spoke = {outcome.rank for outcome in outcomes}
    verdicts = [verdict for node in seen.training for verdict in node.verdicts if verdict.kind in _VERDICT_CLASS]
    causes = [v for v in verdicts if not _is_echo(v, spoke)]
    if not causes:
        return None
    # Hardware and memory explain an exit; an exit never explains them.
    first = min(causes, key=lambda v: (v.kind is VerdictKind.EXITED, v.fault_unix or v.detected_unix or seen.now_unix))
    cls = _VERDICT_CLASS[first.kind]
    if first.exit_code is not None and first.exit_code > 0:
        cls = EXIT_CODES.get(first.exit_code) or cls
    found_by_all = cls is FailureClass.DESYNC  # each rank ends with its code: this one is not named
    return Fault(
        cls=cls,
        message=first.message or f"{first.kind} on {first.node}",
        fingerprint=fingerprint(cls, f"{first.kind} {first.exit_code} {first.phase}", first.node),
        node=None if found_by_all else first.node,
        rank=None if found_by_all else first.rank,
        phase=first.phase,
        step=first.step,
        evidence=first.evidence,
        fault_unix=first.fault_unix,
        detected_unix=first.detected_unix,
    )


def _is_echo(verdict: AgentVerdict, spoke: set[int]) -> bool:
    if verdict.kind is not VerdictKind.EXITED:
        return False
    return verdict.exit_code in (*_TERMINATED, 0, 75) or verdict.rank in spoke


def _crashed(seen: CycleObservation, outcomes: list[Outcome], ever_stepped: bool) -> Fault | None:
    """The earliest exception that is no echo. While a node is out of touch, exceptions elsewhere may well be."""
    missing = {node.name for node in seen.training if not node.connected}
    for outcome in outcomes:
        if outcome.kind is not OutcomeKind.CRASHED or is_cascade(_text(outcome)):
            continue
        if missing and (outcome.node or _node_of(seen, outcome.rank)) not in missing:
            continue
        return _of_outcome(seen, outcome, _class_of_exception(outcome, seen, ever_stepped))
    return None


def _text(outcome: Outcome) -> str:
    exception = outcome.exception
    return f"{outcome.message} {exception.type} {exception.message}" if exception else outcome.message


def _class_of_exception(outcome: Outcome, seen: CycleObservation, ever_stepped: bool) -> FailureClass:
    text = _text(outcome)
    for pattern, cls in SIGNATURES[:-1]:
        if pattern.search(text):
            return cls
    code = outcome.exception is not None and outcome.exception.type.rpartition(".")[2] in CODE_TYPES
    if code and not _stepped(seen):
        return FailureClass.START_FAIL if ever_stepped else FailureClass.CONFIG
    return FailureClass.RANK_CRASH


def _stepped(seen: CycleObservation) -> bool:
    """True when some rank of this cycle completed a step beyond the one it resumed from."""
    from_step = resume_step(seen.resume_from) or 0
    beats = (rank.step for rank in seen.ranks if rank.epoch == seen.epoch)
    spoken = (outcome.step for outcome in seen.outcomes if outcome.epoch == seen.epoch)
    return any(step is not None and step > from_step for step in (*beats, *spoken))


def _standstill(seen: CycleObservation, health: Health, outcomes: list[Outcome]) -> Fault | None:
    if seen.stage is not Stage.RUNNING:
        return None
    spoke = {outcome.rank for outcome in outcomes}
    suspects = [suspect for suspect in health.suspects if suspect.rank not in spoke]
    if suspects:
        return _of_suspect(suspects, seen)
    if not health.stuck:
        return None
    first = max(health.stuck, key=lambda rank: rank.age_s or 0.0)
    cls = FailureClass.HANG_COLLECTIVE if first.phase is not None else FailureClass.START_FAIL
    return Fault(
        cls=cls,
        message=f"{len(health.stuck)} of {len(health.ranks)} ranks: {first.why}",
        fingerprint=fingerprint(cls, "standstill", first.phase),
        phase=first.phase,
        step=first.step,
        fault_unix=seen.now_unix - (first.age_s or 0.0),
    )


def _of_suspect(suspects: list[RankHealth], seen: CycleObservation) -> Fault | None:
    first = suspects[0]
    gone = first.state is RankState.GONE
    if gone and any(node.torchrun_exit == 0 for node in seen.training if node.name == first.node):
        return None  # the launcher ended well: its workers are gone because they are done
    cls = FailureClass.RANK_CRASH if gone else FailureClass.HANG_LOCAL
    more = f" (and {len(suspects) - 1} more)" if len(suspects) > 1 else ""
    return Fault(
        cls=cls,
        message=f"rank {first.rank} on {first.node}: {first.why}{more}",
        fingerprint=fingerprint(cls, f"{first.state} {first.phase}", first.node),
        node=first.node,
        rank=first.rank,
        phase=first.phase,
        step=first.step,
        fault_unix=None if first.age_s is None else seen.now_unix - first.age_s,
    )


def _failed_nodes(seen: CycleObservation) -> list[NodeObservation]:
    return [node for node in seen.training if node.torchrun_exit not in (None, 0)]


def _log(seen: CycleObservation, ever_stepped: bool) -> Fault | None:
    """Only when something ended badly: a frightening line in a healthy log is no fault."""
    if not _failed_nodes(seen):
        return None
    for signature in sorted(seen.signatures, key=lambda s: s.unix if s.unix is not None else float("inf")):
        cls = _class_of_line(signature.line, seen, ever_stepped)
        if cls is not None:
            return Fault(
                cls=cls,
                message=signature.line,
                fingerprint=fingerprint(cls, signature.line, None),
                node=signature.node,
                fault_unix=signature.unix,
            )
    return None


def _class_of_line(line: str, seen: CycleObservation, ever_stepped: bool) -> FailureClass | None:
    if is_cascade(line):
        return None
    for pattern, cls in SIGNATURES:
        if pattern.search(line):
            if pattern is not CODE:
                return cls
            if _stepped(seen):
                return FailureClass.RANK_CRASH
            return FailureClass.START_FAIL if ever_stepped else FailureClass.CONFIG
    return None


def _bare_end(seen: CycleObservation, outcomes: Iterable[Outcome], ever_stepped: bool) -> Fault | None:
    """Something ended and nobody said why, or only echoes did."""
    echoes = [outcome for outcome in outcomes if outcome.kind not in _WELL]
    failed = _failed_nodes(seen)
    unsaid = seen.stage is Stage.ENDED and not any(outcome.kind in _WELL for outcome in outcomes)
    if not echoes and not failed and not unsaid:
        return None
    cls = FailureClass.UNKNOWN if _stepped(seen) else FailureClass.START_FAIL
    if echoes:
        message = f"only echoes of a failure are known, first: {_sentence(echoes[0])}"
    elif failed:
        message = f"torchrun on {failed[0].name} ended with code {failed[0].torchrun_exit} and no rank said why"
    else:
        message = "every process ended and no rank said why"
    return Fault(
        cls=cls,
        message=message,
        fingerprint=fingerprint(cls, "bare end", None),
        step=echoes[0].step if echoes else None,
        phase=echoes[0].phase if echoes else None,
        fault_unix=echoes[0].written_unix if echoes else None,
        cascade_only=True,
    )
