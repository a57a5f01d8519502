"""What `pawl ckpt` does: list, verify, compare, keep, release and remove checkpoints."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from orchestrator.cli.app import pass_to_trainer
from orchestrator.cli.places import the_run
from orchestrator.control.shelf import Item, Shelf, choose, committed_name, read_shelf, why_not_removable
from orchestrator.errors import PawlError, UsageError
from orchestrator.state import gc
from orchestrator.state.ledger import Ledger
from orchestrator.state.provenance import whoami
from orchestrator.state.requests import new_ulid
from orchestrator.state.run_at import need_checkpoint, parse_run_at
from orchestrator.state.rundir import EntryKind, check_owner
from orchestrator.submit.quoting import check_text
from orchestrator.views.human import UNKNOWN, duration, harmless, size

_TRAINER_PROG = "pawl ckpt"


def open_shelf(text: str, *, runs_root: Path | None, site: Path | None) -> Shelf:
    """The shelf of the run that RUN or RUN@STEP names."""
    return read_shelf(the_run(parse_run_at(text).run, runs_root=runs_root, site=site))


def show(run: str, *, runs_root: Path | None, site: Path | None, as_json: bool) -> int:
    """List everything in checkpoints/."""
    shelf = read_shelf(the_run(run, runs_root=runs_root, site=site))
    if as_json:
        typer.echo(json.dumps(as_data(shelf), indent=2, ensure_ascii=False))
        return 0
    for line in table_lines(shelf, now=time.time()):
        typer.echo(line)
    return 0


def as_data(shelf: Shelf) -> dict[str, Any]:
    """The document of `ls --json`."""
    return {
        "schema_version": 1,
        "run": shelf.run,
        "run_dir": str(shelf.paths.root),
        "retention": asdict(shelf.retention),
        "checkpoints": [item_data(item) for item in shelf.items],
    }


def item_data(item: Item) -> dict[str, Any]:
    """One entry as plain data."""
    return {
        "name": item.entry,
        "kind": str(item.kind),
        "step": item.step,
        "epoch": None if item.epoch is None else item.epoch.text,
        "bytes": item.bytes,
        "created_unix": item.created_unix,
        "mesh": None if item.mesh is None else asdict(item.mesh),
        "counts": item.counts,
        "why_not": item.why_not,
        "kept_name": item.label,
        "resumed_from": item.is_resumed_from,
        "stays": item.fate,
    }


def table_lines(shelf: Shelf, *, now: float) -> list[str]:
    """The entries for a person."""
    if not shelf.items:
        return [f"{shelf.run} has no checkpoints yet."]
    rows = [("checkpoint", "step", "size", "age", "mesh", "counts", "stays because")]
    for item in shelf.items:
        age = None if item.created_unix is None else max(0.0, now - item.created_unix)
        rows.append(
            (
                harmless(item.entry) + (" *" if item.is_resumed_from else ""),
                UNKNOWN if item.step is None else f"{item.step:,}",
                size(item.bytes),
                duration(age),
                mesh_text(item),
                "yes" if item.counts else f"no: {harmless(item.why_not or '')}",
                stays_text(item),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(item.is_resumed_from for item in shelf.items):
        lines.append("* the newest launch resumed from it")
    return lines


def mesh_text(item: Item) -> str:
    mesh = item.mesh
    return UNKNOWN if mesh is None else f"dp {mesh.dp} × pp {mesh.pp} × tp {mesh.tp}"


def stays_text(item: Item) -> str:
    """Why an entry stays, or what becomes of it."""
    if item.label is not None:
        return f"kept by name: {harmless(item.label)}" if item.label else "kept by name"
    if item.fate is not None:
        return item.fate
    return "may go: retention asks for no more" if item.counts else "`pawl clean` says what goes"


def verify(text: str, *, every: bool, runs_root: Path | None, site: Path | None) -> int:
    """Verify one checkpoint or all complete ones; 1 when any is damaged."""
    shelf = open_shelf(text, runs_root=runs_root, site=site)
    at = parse_run_at(text)
    if every and (at.step is not None or at.entry is not None):
        raise UsageError(f"--all verifies every checkpoint of a run; {text!r} names one. Leave out one of the two.")
    complete = [item for item in shelf.items if item.kind is EntryKind.COMMITTED]
    items = complete if every else [choose(shelf, at)]
    if not items:
        raise UsageError(f"{shelf.run} has no complete checkpoint yet. `pawl save-now {shelf.run}` asks for one.")
    bad = []
    for number, item in enumerate(items, start=1):
        if len(items) > 1:
            typer.echo(f"[{number}/{len(items)}] {item.entry}", err=True)
        path = str(shelf.paths.checkpoints / item.entry)
        code = pass_to_trainer("inspect", [path, "--verify", "--short"], prog=f"{_TRAINER_PROG} verify")
        if code == 130:
            return code
        if code:
            bad.append(item)
    for item in bad:
        typer.echo(f"pawl: {advice(shelf, item)}", err=True)
    return 1 if bad else 0


def advice(shelf: Shelf, item: Item) -> str:
    """What to do about a damaged checkpoint."""
    if not item.counts:
        return f"{item.entry} is damaged and does not count anyway; `pawl ckpt rm {shelf.run}@{item.entry}` removes it."
    older = shelf.counting.before(item.step or 0)
    back = "the beginning" if older is None else older.name
    return (
        f"{item.entry} is damaged. A launch that meets it sets it aside and goes on from the one before ({back}). If "
        f"its files are mirrored elsewhere, restore them before that; a fork or an export of it is refused."
    )


def diff(one: str, other: str, *, runs_root: Path | None, site: Path | None, as_json: bool) -> int:
    """Compare two checkpoints by the trainer's own command."""
    paths = [_checkpoint_path(text, runs_root=runs_root, site=site) for text in (one, other)]
    arguments = [str(paths[0]), "--diff", str(paths[1]), *(["--json"] if as_json else [])]
    return pass_to_trainer("inspect", arguments, prog=f"{_TRAINER_PROG} diff")


def _checkpoint_path(text: str, *, runs_root: Path | None, site: Path | None) -> Path:
    """The folder of RUN@STEP, or of a path that holds a manifest."""
    if (Path(text) / "manifest.json").is_file():
        return Path(text)
    at = need_checkpoint(text)
    shelf = open_shelf(text, runs_root=runs_root, site=site)
    return shelf.paths.checkpoints / choose(shelf, at).entry


def keep(text: str, *, label: str, runs_root: Path | None, site: Path | None) -> int:
    """Write down that a checkpoint stays, then look whether it is still there."""
    check_text(label, key="--name")
    at, shelf = need_checkpoint(text), open_shelf(text, runs_root=runs_root, site=site)
    check_owner(shelf.paths)
    item = choose(shelf, at)
    name = committed_name(item).text
    writer = Ledger(shelf.paths.root, f"cli-{new_ulid()}")
    writer.append(shelf.epoch, "checkpoint_kept", {"name": name, "label": label, "by": whoami()})
    # A retention that runs this moment looks into the ledger after its rename, and puts back what it finds here.
    if not shelf.paths.checkpoint(name).is_dir():
        raise PawlError(
            f"{name} was being deleted by retention at this very moment. `pawl ckpt ls {shelf.run}` shows whether it "
            "is back; if not, keep another one."
        )
    typer.echo(f"Kept {name}: nothing deletes it until `pawl ckpt release {shelf.run}@{name}`.")
    return 0


def release(text: str, *, runs_root: Path | None, site: Path | None) -> int:
    """Write down that retention may have a checkpoint again."""
    at, shelf = need_checkpoint(text), open_shelf(text, runs_root=runs_root, site=site)
    check_owner(shelf.paths)
    name = choose(shelf, at).entry
    if name not in shelf.kept:
        kept = ", ".join(sorted(shelf.kept)) or "none"
        raise UsageError(f"{name} is not kept by name. Kept are: {kept}.")
    writer = Ledger(shelf.paths.root, f"cli-{new_ulid()}")
    writer.append(shelf.epoch, "checkpoint_released", {"name": name, "by": whoami()})
    typer.echo(f"Released {name}: retention treats it like any other.")
    return 0


def remove(text: str, *, yes: bool, runs_root: Path | None, site: Path | None) -> int:
    """Remove one entry, after a question."""
    at, shelf = need_checkpoint(text), open_shelf(text, runs_root=runs_root, site=site)
    check_owner(shelf.paths)
    item = choose(shelf, at)
    why = why_not_removable(shelf, item)
    if why is not None:
        raise PawlError(f"{item.entry} is not removed: {why}")
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"{item.entry} would be removed for good; say so with --yes.")
        if not typer.confirm(f"Remove {item.entry} ({size(item.bytes)}) of {shelf.run} for good?"):
            typer.echo("Nothing was removed.")
            return 1
    left = discard(shelf, item.entry)
    writer = Ledger(shelf.paths.root, f"cli-{new_ulid()}")
    writer.append(shelf.epoch, "checkpoint_removed", {"name": item.entry, "by": whoami()})
    if left:
        raise PawlError(
            f"{item.entry} counts no more, but {shelf.paths.checkpoints / left} could not be removed whole."
        )
    typer.echo(f"Removed {item.entry} ({size(item.bytes)}).")
    return 0


def discard(shelf: Shelf, entry: str) -> str | None:
    """Move an entry to the trash and empty it; the trash that could not be removed whole, else None.

    Raises PawlError, the entry back in its place, when another launch began meanwhile.
    """
    if not gc.to_trash(shelf.paths, entry, epoch=shelf.epoch):
        raise PawlError(f"{entry} was kept by name at this very moment, so it stays.")
    return next(iter(gc.empty_trash(shelf.paths, (shelf.paths.trash(entry).name,))), None)
