"""The closing tables of the demo, from `pawl status RUN --json`. They fit a terminal of 80 columns."""

import json
import subprocess
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

# Parts of a restart in their order in time: key of the view, heading.
PARTS = (
    ("detection_s", "detect"),
    ("teardown_s", "stop"),
    ("backoff_s", "wait"),
    ("start_s", "start"),
    ("load_s", "load"),
    ("total_s", "total"),
)


def _s(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.1f}"


def view_of(pawl: str, run: str) -> dict[str, Any]:
    out = subprocess.run([pawl, "status", run, "--json"], capture_output=True, text=True, check=True).stdout
    view: dict[str, Any] = json.loads(out)
    return view


def _table(*columns: str) -> Table:
    """A small table whose first column is text that may wrap, the others numbers that may not."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number > 0, overflow="fold", justify="right" if number else "left")
    return table


def incidents(view: dict[str, Any]) -> Table:
    """One row per restart: what failed and where, the ladder's level, seconds per part, steps trained again."""
    headings = [heading for _, heading in PARTS]
    table = _table("what", "level", *headings, "lost steps")
    for incident in view["incidents"]:
        cost = incident["cost"] or {}
        where = incident["node"] if incident["rank"] is None else f"{incident['node']} rank {incident['rank']}"
        lost = cost.get("lost_steps")
        table.add_row(
            f"{incident['failure_class']} {where}",
            incident["level"] or "",
            *(_s(cost.get(key)) for key, _ in PARTS),
            "?" if lost is None else str(lost),
        )
    return table


def goodput(view: dict[str, Any]) -> Table:
    """Seconds and share of every category; their sum is the wall time."""
    book = view["goodput"]
    table = _table("category", "seconds", "share")
    for category, seconds in sorted(book["seconds"].items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(category, f"{seconds:.1f}", f"{seconds / book['wall_s']:.1%}")
    table.add_section()
    table.add_row("sum", f"{sum(book['seconds'].values()):.1f}", "")
    table.add_row("wall time", f"{book['wall_s']:.1f}", "")
    return table


def phases(seconds: dict[str, float]) -> Table:
    """Seconds of each part of the demo itself."""
    table = _table("part", "seconds")
    for title, spent in seconds.items():
        table.add_row(title, f"{spent:.0f}")
    table.add_section()
    table.add_row("sum", f"{sum(seconds.values()):.0f}")
    return table


def print_tables(console: Console, view: dict[str, Any], metrics_urls: list[str], spent: dict[str, float]) -> None:
    """Steps, tokens, restarts with class and cost, goodput by category, the demo's own time, metrics addresses."""
    progress = view["progress"]
    console.print(
        f"[bold]{view['run']}[/]: {view['state']} at step {progress['step']:,} of {progress['train_steps']:,}, "
        f"{progress['tokens']:,} tokens, loss {progress['loss']:.3f}, {len(view['incidents'])} restarts, "
        f"{progress['recomputed_steps']} steps trained twice\n"
    )
    console.print("[bold]Restarts: seconds from the fault to training again[/]", incidents(view), sep="")
    console.print("[bold]Where the run's time went[/]", goodput(view), sep="")
    console.print("[bold]How long the parts of the demo took[/]", phases(spent), sep="")
    console.print("Metrics were served at:", *metrics_urls, sep="\n  ")
