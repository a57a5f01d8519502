"""What the data of each kind of ledger line may hold: the one place where it is checked, before anybody uses it.

    kind → field → sort      every field may be absent or null; fields that are not named may hold any sane value

Readers can rely on it: a text is a text, a count fits 64 bits, a time lies in the calendar. A line that says something
else says nothing that can be acted on; it is reported as unreadable with the field named, like a line that is no JSON.
"""

from collections.abc import Callable
from typing import Any

from orchestrator.state.codec import LAST_UNIX, MAX_INT, show

_MAX_NUMBER = 1e18
_MAX_EPOCH = 10**6
_MAX_DEPTH = 32

Sort = tuple[str, Callable[[Any], bool]]


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= MAX_INT


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _MAX_NUMBER  # false for NaN


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_nodes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("name", "address")) for item in value
    )


_T: Sort = ("a text", lambda value: isinstance(value, str))
_I: Sort = ("an integer of 64 bits", _is_int)
_N: Sort = ("an attempt number", lambda value: _is_int(value) and 0 <= value <= _MAX_EPOCH)
_F: Sort = (f"a number up to {_MAX_NUMBER:g}", _is_number)
_U: Sort = ("seconds since 1970", lambda value: _is_number(value) and 0 <= value <= LAST_UNIX)
_B: Sort = ("true or false", lambda value: isinstance(value, bool))
_L: Sort = ("a list of texts", _is_texts)
_JOB: Sort = ("a job id", lambda value: isinstance(value, str) or _is_int(value))
_NODES: Sort = ("a list of nodes with name and address", _is_nodes)

_WORDS = {"rule": _T, "reason": _T, "hint": _T}
_FIELDS: dict[str, dict[str, Sort]] = {
    "run_created": {"run": _T, "world_size": _I, "nodes": _I, "spares": _I, "launcher": _T, "by": _T},
    "attempt_intent": {"attempt": _N, "nonce": _T, "launcher": _T, "exclude": _L},
    "attempt_submitted": {"attempt": _N, "job_id": _JOB, "pid": _I},
    "attempt_started": {"nonce": _T, "host": _T, "pid": _I, "nodes": _NODES},
    "attempt_ended": {"attempt": _N, "outcome": _T, "reason": _T, "rule": _T},
    "cycle_started": {
        **{"nodes": _L, "spares": _L, "resume_from": _T, "world_size": _I, "incident": _T, "level": _T},
    },
    "cycle_running": {"step": _I, "start_s": _F, "load_s": _F},
    "cycle_ended": {"outcome": _T, "exit_code": _I, "step": _I},
    "incident": {
        **{"id": _T, "class": _T, "rule": _T, "level": _T, "node": _T, "rank": _I, "phase": _T, "step": _I},
        **{"fingerprint": _T, "message": _T, "evidence": _L, "fault_unix": _U, "detected_unix": _U},
    },
    "teardown": {"seconds": _F, "orphans": _I},
    "decision": {
        **{"rule": _T, "action": _T, "level": _T, "reason": _T, "backoff_s": _F, "exclude": _L, "resume_from": _T},
    },
    "recovered": {
        **{"incident": _T, "class": _T, "level": _T, "detection_s": _F, "teardown_s": _F, "backoff_s": _F},
        **{"start_s": _F, "load_s": _F, "total_s": _F, "lost_steps": _I},
    },
    "checkpoint_committed": {"name": _T, "step": _I, "bytes": _I},
    "checkpoint_quarantined": {"name": _T, "reason": _T},
    "checkpoint_kept": {"name": _T, "label": _T, "by": _T},
    "checkpoint_released": {"name": _T, "by": _T},
    "checkpoint_removed": {"name": _T, "by": _T},
    "checkpoint_uploaded": {"name": _T, "url": _T, "by": _T},
    "checkpoint_fetched": {"name": _T, "url": _T, "by": _T},
    "errand_failed": {"errand": _T, "name": _T, "reason": _T},
    "forked": {
        **{"run": _T, "run_dir": _T, "step": _I, "checkpoint": _T, "digest": _T, "weights_only": _B},
        **{"by": _T, "why": _T, "set": _L},
    },
    "run_done": {"step": _I},
    "run_held": _WORDS,
    "run_failed": _WORDS,
    "request": {"verb": _T, "id": _T, "by": _T},
    "request_done": {"verb": _T, "id": _T, "by": _T, "result": _T, "where": _T},
    "resumed": {"by": _T, "why": _T, "set": _L, "revision": _I, "from_start": _B, "code": _T},
    "export": {"step": _I, "out": _T},
}
KINDS = tuple(_FIELDS)


def defect(kind: str, epoch: tuple[int, int, int], seq: int, data: dict[str, Any]) -> str | None:
    """The first thing in a ledger line that no reader could use, as a sentence; None when there is none."""
    if max(epoch) > _MAX_EPOCH or not 0 <= seq <= MAX_INT:
        return f"epoch {show(list(epoch))}, seq {show(seq)}: no launch has such numbers"
    for name, (what, fits) in _FIELDS.get(kind, {}).items():
        value = data.get(name)
        if value is not None and not fits(value):
            return f"data.{name}: expected {what}, found {show(value)}"
    for name, value in data.items():
        why = _insane(value)
        if why is not None:
            return f"data.{show(name)}: {why}"
    return None


def _insane(value: object, depth: int = 0) -> str | None:
    """Why a value that nobody has described can hurt whoever prints it; None when it cannot."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if _is_number(value) else f"found {show(value)}, which is no number that is ever written"
    if isinstance(value, dict | list):
        if depth == _MAX_DEPTH:
            return "it is nested without end"
        items = value.values() if isinstance(value, dict) else value
        return next((why for item in items if (why := _insane(item, depth + 1)) is not None), None)
    return None
