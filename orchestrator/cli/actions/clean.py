"""What `pawl clean` prints and removes."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from orchestrator.cli.places import the_run
from orchestrator.control.leftovers import Leftover, find_leftovers, remove_leftovers
from orchestrator.control.shelf import read_shelf
from orchestrator.errors import PawlError
from orchestrator.state.ledger import Ledger
from orchestrator.state.provenance import whoami
from orchestrator.state.requests import new_ulid
from orchestrator.state.rundir import check_owner
from orchestrator.views.human import UNKNOWN, harmless, plural, size


def clean(
    run: str, *, apply: bool, logs_days: float, runs_root: Path | None, site: Path | None, as_json: bool
) -> int:  # fmt: skip
    """List what may go; with `apply` remove it. 1 when something of it is still there afterwards."""
    shelf = read_shelf(the_run(run, runs_root=runs_root, site=site))
    if apply:
        check_owner(shelf.paths)
    found = find_leftovers(shelf, now_unix=time.time(), logs_days=logs_days)
    removed: list[Leftover] = []
    failed: list[tuple[Leftover, str]] = []
    if not as_json:
        for line in table_lines(shelf.run, found):
            typer.echo(line)
    if apply:
        writer = Ledger(shelf.paths.root, f"cli-{new_ulid()}")
        for leftover, why in remove_leftovers(shelf, found):
            if why is not None:
                failed.append((leftover, why))
                continue
            removed.append(leftover)
            if leftover.path.startswith("checkpoints/"):
                data = {"name": Path(leftover.path).name, "by": whoami()}
                writer.append(shelf.epoch, "checkpoint_removed", data)
    if as_json:
        document = {
            "schema_version": 1,
            "run": shelf.run,
            "run_dir": str(shelf.paths.root),
            "items": [asdict(leftover) for leftover in found],
            "total_bytes": total(found),
            "applied": apply,
            "removed": [leftover.path for leftover in removed],
            "failed": [{"path": leftover.path, "why": why} for leftover, why in failed],
        }
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    elif apply and found:
        typer.echo(f"Removed {plural(len(removed), 'item')}, {size(total(removed))}.")
    elif total(found) or any(leftover.stays is None for leftover in found):
        typer.echo(f"Nothing was removed. To remove it: pawl clean {shelf.run} --apply")
    if failed and not as_json:
        raise PawlError(f"{plural(len(failed), 'item')} could not be removed; the first: {failed[0][1]}.")
    return 1 if failed else 0


def total(leftovers: Sequence[Leftover]) -> int:
    """Bytes that may go, as far as they are known."""
    return sum(leftover.bytes or 0 for leftover in leftovers if leftover.stays is None)


def table_lines(run: str, found: Sequence[Leftover]) -> list[str]:
    """What may go, what stays all the same, and the sum."""
    if not found:
        return [f"{run} holds nothing that could go."]
    rows = [("what", "size", "where", "why")]
    for leftover in found:
        why = leftover.why if leftover.stays is None else f"{leftover.why}; STAYS: {leftover.stays}"
        rows.append((leftover.kind, size(leftover.bytes), harmless(leftover.path), harmless(why)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    unknown = sum(leftover.bytes is None and leftover.stays is None for leftover in found)
    more = f" and {plural(unknown, 'item')} of unknown size ({UNKNOWN})" if unknown else ""
    return [*lines, f"{size(total(found))} may go{more}."]
