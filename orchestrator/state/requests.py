"""Requests of people: control/<verb>-<ulid>, acted on once, acknowledged in the ledger by their ulid.

A request is a file that appears whole. Whoever acts on it appends `request_done` and removes the file; a crash between
the two is harmless, because an acknowledged id is never acted on again. A request older than the last `resumed` is
void: a drain that nobody saw must not stop the run that a person has just resumed.
"""

import os
import time
from dataclasses import replace

from orchestrator.errors import PawlError
from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names, read_text, write_atomic
from orchestrator.state.history import History
from orchestrator.state.ledger import Ledger
from orchestrator.state.records import Request, Unreadable, Verb, parse_request
from orchestrator.state.rundir import RunPaths, parse_request_name

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_ulid(now_unix: float | None = None) -> str:
    """26 letters that sort by time: 48 bits of milliseconds, 80 random bits (the ULID specification)."""
    millis = int((time.time() if now_unix is None else now_unix) * 1000) & ((1 << 48) - 1)
    number = (millis << 80) | int.from_bytes(os.urandom(10))
    return "".join(_CROCKFORD[(number >> shift) & 31] for shift in range(125, -1, -5))


def make_request(
    verb: Verb, *, by: str, now_unix: float, steps: int | None = None, ranks: tuple[int, ...] | None = None
) -> Request:
    """A request as it is written."""
    return Request(verb=verb, by=by, created_unix=now_unix, steps=steps, ranks=ranks)


def write_request(paths: RunPaths, request: Request, *, ulid: str) -> None:
    """Leave a request, mode 0600. Raises PawlError when the folder does not take it."""
    path = paths.request(str(request.verb), ulid)
    try:
        write_atomic(path, dumps(replace(request, id=ulid)) + "\n", mode=0o600)
    except OSError as error:
        raise PawlError(
            f"The request could not be left in {path.parent}: {error.strerror}. The run directory must be yours and "
            "its disk must have room."
        ) from error


def read_requests(paths: RunPaths) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    """All requests in order of their ulid, and what could not be read (one sentence each)."""
    names = list_names(paths.control)
    if names is None:
        return (), ("control/: cannot be listed",)
    found: list[Request] = []
    problems: list[str] = []
    for name in names:
        parsed = parse_request_name(name)
        if parsed is None:
            continue
        verb, ulid = parsed
        request = parse_request(read_text(paths.control / name))
        if isinstance(request, Unreadable):
            problems.append(f"control/{name}: {request.why}")
        elif request.verb != verb:
            problems.append(f"control/{name}: its content asks for {request.verb}")
        else:
            found.append(replace(request, id=ulid))
    return tuple(sorted(found, key=lambda request: request.id)), tuple(problems)


def open_requests(requests: tuple[Request, ...], history: History) -> tuple[Request, ...]:
    """Those that nobody has acknowledged and that no later `resumed` made void. Pure."""
    since = history.resumed_unix
    return tuple(
        request
        for request in requests
        if request.id not in history.requests_done and (since is None or request.created_unix >= since)
    )


def acknowledge(
    paths: RunPaths, ledger: Ledger, epoch: Epoch, request: Request, *, result: str, where: str | None = None
) -> None:
    """Say in the ledger what came of a request and where it lies, then remove its file. Raises OSError."""
    data = {"verb": str(request.verb), "id": request.id, "result": result}
    ledger.append(epoch, "request_done", data if where is None else {**data, "where": where})
    paths.request(str(request.verb), request.id).unlink(missing_ok=True)
