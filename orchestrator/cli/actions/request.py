"""What drain, cancel, save-now and profile do: leave a request, wait for its answer; which checkpoint is meant."""

import re
import time
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli.places import the_run
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import ledger
from orchestrator.state.fsio import list_names, read_text
from orchestrator.state.provenance import whoami
from orchestrator.state.records import Request, Verb
from orchestrator.state.requests import make_request, new_ulid, write_request
from orchestrator.state.rundir import RunPaths, check_owner, parse_trace_name
from orchestrator.views.records import CheckpointView, RunView
from orchestrator.views.run_view import run_view

_POLL_S = 0.2
SHOWN_TRACES, SHOWN_OPERATORS = 16, 12
# What the run says it did, whatever it was asked for: a save-now may be answered by a drain that came with it.
# {wrote} and {start} are what its checkpoints say.
_ANSWERS = {
    "drained": "{run} {wrote} and ended. Go on from {start} with: pawl resume {run}",
    "cancelled": "{run} was ended. Go on from {start} with: pawl resume {run}",
    "saved": "{run} wrote a checkpoint and trains on.",
    "done": "{run} had come to its end.",
    "the run is complete": "{run} is complete.",
}


def ask(run: str, verb_text: str, *, timeout_s: float, runs_root: Path | None, site: Path | None) -> int:
    """Leave the request and wait until the ledger acknowledges it. Ctrl-C leaves the request standing."""
    verb = Verb(verb_text)
    paths = the_run(run, runs_root=runs_root, site=site)
    check_owner(paths)
    view = run_view(paths.root)
    if view.state.is_over:
        typer.echo(f"{view.run} is {view.state}: there is nothing to {verb_text}. `pawl status {view.run}` says more.")
        return 0
    found = _request(paths, view, make_request(verb, by=whoami(), now_unix=time.time()), timeout_s=timeout_s)
    if found is not None:
        result = str(found.get("result"))
        if result not in _ANSWERS:
            raise PawlError(f"{view.run} answered the request to {verb_text}: {result}. See `pawl explain {view.run}`.")
        typer.echo(answer(result, before=view, after=run_view(paths.root)))
    return 0


def _request(paths: RunPaths, view: RunView, request: Request, *, timeout_s: float) -> dict[str, Any] | None:
    """Leave the request and wait: the data of its answer, None when a person stopped the waiting. Raises PawlError."""
    request_id = new_ulid()
    write_request(paths, request, ulid=request_id)
    typer.echo(f"Asked {view.run} to {request.verb}; waiting up to {timeout_s:g} s for its answer …")
    try:
        found = _wait(paths, request_id, timeout_s=timeout_s)
    except KeyboardInterrupt:
        typer.echo(f"\nStopped waiting; the request stands. `pawl status {view.run}` shows when it is done.")
        return None
    if found is None:
        raise PawlError(_no_answer(view, request.verb, timeout_s))
    return found


def profile(
    run: str, *, steps: int, ranks_text: str, timeout_s: float, runs_root: Path | None, site: Path | None
) -> int:
    """Ask for traces of the next steps, wait for them, and say where they lie and what took most time."""
    paths = the_run(run, runs_root=runs_root, site=site)
    check_owner(paths)
    view = run_view(paths.root)
    ranks = parse_ranks(ranks_text, world_size=view.world_size)
    if view.state.is_over:
        raise PawlError(
            f"{view.run} is {view.state}: nothing trains, so there is nothing to profile. `pawl resume {view.run}` "
            "goes on with it; the `profiler:` section of a config profiles steps without being asked."
        )
    request = make_request(Verb.PROFILE, by=whoami(), now_unix=time.time(), steps=steps, ranks=ranks)
    found = _request(paths, view, request, timeout_s=timeout_s)
    if found is None:
        return 0
    result, where = str(found.get("result")), found.get("where")
    if result in _ANSWERS:
        raise PawlError(f"No profile: {_ANSWERS[result].format(run=view.run, wrote='saved', start='its checkpoint')}")
    if result != "profiled" or not isinstance(where, str):
        raise PawlError(
            f"{view.run} recorded nothing: its ranks stopped before, or no trace could be written. "
            f"`pawl logs {view.run}` and `pawl explain {view.run}` say what happened."
        )
    typer.echo(profile_text(paths.root / where, run=view.run))
    return 0


def parse_ranks(text: str, *, world_size: int | None) -> tuple[int, ...] | None:
    """Rank numbers of `0,3`; None of `all`. Raises UsageError for anything else and for ranks that the run has not."""
    if text == "all":
        return None
    if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", text, re.ASCII):
        raise UsageError(f"--ranks {text!r} is no list of ranks. Write for example 0, or 0,3, or all.")
    ranks = tuple(sorted({int(part) for part in text.split(",")}))
    if world_size is not None and ranks[-1] >= world_size:
        raise UsageError(f"--ranks {text}: the run has ranks 0 to {world_size - 1}.")
    return ranks


def profile_text(folder: Path, *, run: str) -> str:
    """Which traces lie in the folder, how to open them, and the first rank's operators."""
    traces = [name for name in list_names(folder) or () if parse_trace_name(name) is not None]
    lines = [f"{run} recorded its steps and trains on. Open a trace at ui.perfetto.dev or in chrome://tracing:"]
    lines += [f"  {folder / name}" for name in traces[:SHOWN_TRACES]]
    if len(traces) > SHOWN_TRACES:
        lines.append(f"  and {len(traces) - SHOWN_TRACES} more")
    if traces:
        summary = read_text(folder / traces[0].replace(".json.gz", ".txt")) or ""
        lines += ["", *summary.splitlines()[:SHOWN_OPERATORS]]
    return "\n".join(lines)


def answer(result: str, *, before: RunView, after: RunView) -> str:
    """What the run did, by its word and by what its checkpoints were before and are after it. Pure."""
    newest, known = after.newest_checkpoint, before.newest_checkpoint
    is_new = newest is not None and (known is None or newest.name != known.name)
    wrote = "wrote its last checkpoint" if is_new else "had nothing running that could write a newer checkpoint"
    start = "the beginning" if newest is None else newest.name
    return _ANSWERS[result].format(run=after.run, wrote=wrote, start=start)


def _wait(paths: RunPaths, request_id: str, *, timeout_s: float) -> dict[str, Any] | None:
    """The data of the ledger's `request_done` of this request; None after the time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        for event in ledger.read_all(paths.root):
            if event.kind == "request_done" and event.data.get("id") == request_id:
                return event.data
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)


def _no_answer(view: RunView, verb: Verb, timeout_s: float) -> str:
    """Why there may be no answer, and what to do. The request stays: a supervisor that wakes up will act on it."""
    known = f"The run is {view.state}" + (f" ({view.state_reason})" if view.state_reason else "")
    return (
        f"{view.run} did not acknowledge the request to {verb} within {timeout_s:g} s. {known}. The request stands and "
        f"is acted on as soon as somebody reads it: `pawl status {view.run}` shows it, a longer --timeout waits for it."
    )


def passed_over(view: RunView, chosen: CheckpointView, step: int | None) -> tuple[str, ...]:
    """A line for each checkpoint that would have come before `chosen` if it counted, with the reason. Pure."""
    before = [
        checkpoint
        for checkpoint in view.checkpoints
        if not checkpoint.counts and (checkpoint.step > chosen.step if step is None else checkpoint.step == step)
    ]
    return tuple(f"Passed over {item.name}, which does not count: {item.why_not}" for item in before)


def choose_checkpoint(view: RunView, step: int | None) -> CheckpointView:
    """The newest checkpoint that counts, or the one of `step`. Raises UsageError listing what there is."""
    counting = [checkpoint for checkpoint in view.checkpoints if checkpoint.counts]
    wanted = [checkpoint for checkpoint in counting if step is None or checkpoint.step == step]
    if wanted:
        return max(wanted, key=lambda checkpoint: checkpoint.step)
    if not counting:
        bad = "".join(f" {item.name} does not count: {item.why_not}." for item in view.checkpoints)
        raise UsageError(f"{view.run} has no complete checkpoint yet. `pawl save-now {view.run}` asks for one.{bad}")
    steps = ", ".join(str(checkpoint.step) for checkpoint in sorted(counting, key=lambda checkpoint: checkpoint.step))
    raise UsageError(f"{view.run} has no checkpoint of step {step} that counts. There are: {steps}.")
