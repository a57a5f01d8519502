"""What `pawl ckpt push`, `pull` and `copies` do: checkpoints to and from a place behind a URL.

A run's copies lie at <URL>/<run>/<checkpoint>; the URL is `checkpoints.upload_to`, or what a person names.
"""

import json
from pathlib import Path

import typer

from orchestrator.cli.actions.ckpt import open_shelf
from orchestrator.cli.app import pass_to_trainer
from orchestrator.control.copies import read_copies
from orchestrator.control.shelf import Shelf, choose
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import ledger
from orchestrator.state.copies import copies_place, pushed_to, url_problem
from orchestrator.state.counting import Counting
from orchestrator.state.ledger import Ledger
from orchestrator.state.provenance import whoami
from orchestrator.state.requests import new_ulid
from orchestrator.state.run_at import parse_run_at
from orchestrator.state.rundir import check_owner
from orchestrator.submit.facts import frozen_copies
from orchestrator.views.human import UNKNOWN, harmless, size


def push(text: str, *, url: str | None, runs_root: Path | None, site: Path | None) -> int:
    """Copy one checkpoint, by the trainer's own command."""
    shelf = open_shelf(text, runs_root=runs_root, site=site)
    check_owner(shelf.paths)
    place = _place(shelf, url)
    if shelf.recorded_run != shelf.run:
        raise UsageError(
            f"{shelf.paths.root} is the directory of run {shelf.recorded_run} under another name, a copy perhaps. Its "
            "checkpoints would take the place of those of the other; give it back its name, or fork it."
        )
    item = choose(shelf, parse_run_at(text))
    if not item.counts:
        raise UsageError(f"{item.entry} of {shelf.run} does not count ({item.why_not}), so it is not copied.")
    path = str(shelf.paths.checkpoints / item.entry)
    code = pass_to_trainer("transfer", ["push", path, place], prog="pawl ckpt push")
    if code == 0:
        _note(shelf, "checkpoint_uploaded", item.entry, place)
    return code


def pull(text: str, *, url: str | None, runs_root: Path | None, site: Path | None) -> int:
    """Fetch the newest copy that counts, or the one that is named, into checkpoints/."""
    shelf = open_shelf(text, runs_root=runs_root, site=site)
    check_owner(shelf.paths)
    place = _place(shelf, url)
    at = parse_run_at(text)
    counting = read_copies(shelf.paths, place)
    wanted = [
        checkpoint.name
        for checkpoint in counting.counted
        if (at.step is None or checkpoint.step == at.step) and at.entry in (None, checkpoint.name)
    ]
    if not wanted:
        raise UsageError(f"{place} has no copy of {at.text} that counts. {_what_is_there(counting)}")
    made = _made_here(shelf, place)
    names = [name for name in wanted if at.entry == name or name in made]
    if not names:
        raise UsageError(
            f"{place} has {wanted[0]}, but the ledger of {shelf.run} does not say that this run made it; another run "
            f"of that name may have. If it is meant, name it exactly: pawl ckpt pull {shelf.run}@{wanted[0]}"
        )
    code = 1
    for name in names:
        code = _fetch(shelf, name, place)
        if code != 1 or at.step is not None or at.entry is not None:
            break
        typer.echo(f"pawl: {name} could not be fetched; the one before is tried.", err=True)
    return code


def _fetch(shelf: Shelf, name: str, place: str) -> int:
    if (item := shelf.item(name)) is not None and item.counts:
        typer.echo(f"{name} is in {shelf.paths.checkpoints} already.")
        return 0
    arguments = ["pull", place, str(shelf.paths.checkpoints), "--name", name]
    code = pass_to_trainer("transfer", arguments, prog="pawl ckpt pull")
    if code == 0:
        _note(shelf, "checkpoint_fetched", name, place)
        typer.echo(f"Fetched {name} of {shelf.run}. Go on from it with: pawl resume {shelf.run}")
    return code


def show(run: str, *, url: str | None, runs_root: Path | None, site: Path | None, as_json: bool) -> int:
    """List the copies of a run."""
    shelf = open_shelf(run, runs_root=runs_root, site=site)
    place = _place(shelf, url)
    counting = read_copies(shelf.paths, place)
    if as_json:
        good = [{"name": c.name, "step": c.step, "bytes": c.total_bytes, "why_not": None} for c in counting.counted]
        bad = [{"name": r.entry, "step": None, "bytes": None, "why_not": r.why} for r in counting.reported]
        document = {"schema_version": 1, "run": shelf.run, "place": place, "copies": [*good, *bad]}
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return 0
    typer.echo(f"Copies of {shelf.run} at {harmless(place)}:")
    for checkpoint in counting.counted:
        bytes_text = UNKNOWN if checkpoint.total_bytes is None else size(checkpoint.total_bytes)
        typer.echo(f"  {checkpoint.name}  step {checkpoint.step:,}  {bytes_text}")
    for report in counting.reported:
        typer.echo(f"  {harmless(report.entry)}  does not count: {harmless(report.why)}")
    if not counting.counted and not counting.reported:
        typer.echo("  none")
    return 0


def _place(shelf: Shelf, url: str | None) -> str:
    base = url if url is not None else frozen_copies(shelf.paths).upload_to
    if base is None:
        raise UsageError(
            f"{shelf.run} has no place for copies: give --url s3://bucket/folder, or set checkpoints.upload_to "
            "(then a running run copies each checkpoint by itself)."
        )
    wrong = url_problem(base)
    if wrong is not None:
        raise UsageError(f"{'--url' if url is not None else 'checkpoints.upload_to'}: {wrong}.")
    return copies_place(base, shelf.recorded_run or shelf.run)


def _made_here(shelf: Shelf, place: str) -> frozenset[str]:
    return pushed_to(ledger.read_all(shelf.paths.root), place=place)


def _note(shelf: Shelf, kind: str, name: str, place: str) -> None:
    writer = Ledger(shelf.paths.root, f"cli-{new_ulid()}")
    try:
        writer.append(shelf.epoch, kind, {"name": name, "url": place, "by": whoami()})
    except OSError as error:
        raise PawlError(f"{name} was transferred, but the ledger of {shelf.run} does not take it: {error}") from error


def _what_is_there(counting: Counting) -> str:
    known = ", ".join(str(checkpoint.step) for checkpoint in counting.counted)
    bad = "".join(f" {report.entry}: {report.why}." for report in counting.reported[:5])
    return (f"Steps there: {known}." if known else "No complete checkpoint is there.") + bad
