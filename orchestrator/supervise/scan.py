"""One look of the supervisor into the run directory: outcomes, checkpoints, cycle records, requests, logs.

It runs in the I/O thread, because any of these may wait for a file system.
"""

import time
from dataclasses import dataclass

from orchestrator.agent.evidence import last_lines
from orchestrator.control.observe import read_fences, scan_checkpoints
from orchestrator.decide.observation import LogSignature
from orchestrator.decide.signatures import find_signatures
from orchestrator.state.counting import CheckpointEntry, CycleFence
from orchestrator.state.epochs import Epoch
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.presence import Presence, look_for
from orchestrator.state.records import Outcome, Request, Unreadable, parse_outcome
from orchestrator.state.requests import read_requests
from orchestrator.state.rundir import RunPaths, parse_outcome_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What was found by a look that began at `began` (monotonic). `problems`: what could not be read.

    `entries` and `fences` are None when their folders could not be listed: which checkpoints count is unknown then.
    """

    began: float
    epoch: Epoch | None
    outcomes: tuple[Outcome, ...] = ()
    entries: tuple[CheckpointEntry, ...] | None = ()
    fences: tuple[CycleFence, ...] | None = ()
    requests: tuple[Request, ...] = ()
    signatures: tuple[LogSignature, ...] = ()
    problems: tuple[str, ...] = ()
    presence: Presence = Presence.HERE


def scan(paths: RunPaths, attempt: int, epoch: Epoch | None, *, with_logs: bool) -> Scan:
    """Read everything once. `with_logs`: also search the cycle's logs for lines that name a cause."""
    began = time.monotonic()
    requests, problems = read_requests(paths)
    return Scan(
        began=began,
        epoch=epoch,
        outcomes=() if epoch is None else _outcomes(paths, epoch),
        entries=scan_checkpoints(paths),
        fences=read_fences(paths),
        requests=requests,
        signatures=_signatures(paths, epoch) if epoch is not None and with_logs else (),
        problems=problems,
        presence=look_for(paths, attempt),
    )


def _outcomes(paths: RunPaths, epoch: Epoch) -> tuple[Outcome, ...]:
    folder = paths.outcomes(epoch.attempt, epoch.cycle)
    names = (name for name in list_names(folder) or () if parse_outcome_name(name) is not None)
    found = (parse_outcome(read_text(folder / name)) for name in names)
    return tuple(outcome for outcome in found if not isinstance(outcome, Unreadable))


def _signatures(paths: RunPaths, epoch: Epoch) -> tuple[LogSignature, ...]:
    folder = paths.logs(epoch.attempt, epoch.cycle)
    found: list[LogSignature] = []
    for name in list_names(folder) or ():
        text = "\n".join(last_lines(folder / name))
        found += find_signatures(node=name.removesuffix(".log"), text=text)
    return tuple(found)
