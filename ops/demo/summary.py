"""The closing table of the demo, from `pawl status RUN --json`."""

import json
import subprocess
from typing import Any

from rich.console import Console
from rich.table import Table


def _s(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.1f}"


def _view(pawl: str, run: str) -> dict[str, Any]:
    out = subprocess.run([pawl, "status", run, "--json"], capture_output=True, text=True, check=True).stdout
    view: dict[str, Any] = json.loads(out)
    return view


def _incidents(view: dict[str, Any]) -> Table:
    table = Table(
        title="Restarts (seconds: detection + teardown + interpreter start + load = total)", title_justify="left"
    )
    for column in ("what", "level", "detect", "teardown", "start", "load", "total", "lost steps"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("what", "level") else "right")
    for incident in view["incidents"]:
        cost = incident["cost"] or {}
        where = incident["node"] if incident["rank"] is None else f"{incident['node']} rank {incident['rank']}"
        parts = [_s(cost.get(key)) for key in ("detection_s", "teardown_s", "start_s", "load_s", "total_s")]
        lost = cost.get("lost_steps")
        table.add_row(
            f"{incident['failure_class']} ({where})",
            incident["level"] or "",
            *parts,
            "unknown" if lost is None else str(lost),
        )
    return table


def _goodput(view: dict[str, Any]) -> Table:
    book = view["goodput"]
    table = Table(title="Where the time went", title_justify="left")
    table.add_column("category")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for category, seconds in sorted(book["seconds"].items(), key=lambda item: -item[1]):
        if seconds > 0:
            table.add_row(category, f"{seconds:.1f}", f"{seconds / book['wall_s']:.1%}")
    table.add_section()
    table.add_row("sum", f"{sum(book['seconds'].values()):.1f}", "")
    table.add_row("wall time", f"{book['wall_s']:.1f}", "")
    return table


def print_table(console: Console, pawl: str, run: str, metrics_urls: list[str]) -> None:
    """Steps, tokens, restarts with class and cost, goodput by category, metrics addresses."""
    view = _view(pawl, run)
    progress = view["progress"]
    console.print(
        f"[bold]{run}[/]: {view['state']} at step {progress['step']:,} of {progress['train_steps']:,}, "
        f"{progress['tokens']:,} tokens, loss {progress['loss']:.3f}, {len(view['incidents'])} restarts, "
        f"{progress['recomputed_steps']} steps trained twice"
    )
    console.print(_incidents(view))
    console.print(_goodput(view))
    console.print("Metrics were served at " + (", ".join(metrics_urls) or "no address"))
