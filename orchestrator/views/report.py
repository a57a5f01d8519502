"""`pawl report RUN`: the run as one HTML file that needs nothing else, no network and no other file.

    RunView + step lines ──▶ sections (HTML, all escaped) + data (JSON) + plotly.js from its package ──▶ report.html

Colours follow the reader's scheme (light or dark). Long runs are thinned to what a screen can show, keeping each
stretch's extremes, so a spike of one step among a million is still there.
"""

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from orchestrator.config.secret_names import is_secret
from orchestrator.errors import PawlError
from orchestrator.state.fsio import read_text, write_atomic
from orchestrator.state.records import Event
from orchestrator.state.rundir import RunPaths
from orchestrator.state.train_lines import MergedSteps, StepLine
from orchestrator.views import report_sections as sections
from orchestrator.views.human import duration, moment_utc
from orchestrator.views.read import read_run
from orchestrator.views.records import RunView
from orchestrator.views.run_view import RunInputs, build_view, run_steps

MAX_POINTS = 4000
MAX_COLUMNS = 500


def write_report(run_dir: Path, out: Path | None = None, *, now: float | None = None) -> Path:
    """Write the report of a run (RUN_DIR/report.html by default) and return where. Raises PawlError if it cannot be."""
    inputs = read_run(run_dir, now)
    view = build_view(inputs)
    merged = run_steps(inputs.lines, inputs.events)
    data = page_data(view, merged, inputs)
    target = out or run_dir / "report.html"
    text = page(view, data, config=read_text(RunPaths(run_dir).config))
    try:
        write_atomic(target, text, durable=False)
    except OSError as error:
        raise PawlError(
            f"The report cannot be written to {target}: {error.strerror}. `--out FILE` names another place."
        ) from error
    return target


def page(view: RunView, data: dict[str, Any], *, config: str | None) -> str:
    """The whole page."""
    body = "\n".join(
        (
            sections.header(view),
            sections.facts(view),
            sections.answers(view),
            sections.loss_chart(view),
            sections.speed_charts(view),
            sections.goodput(view),
            sections.incidents(view),
            sections.decisions(view),
            sections.checkpoints(view),
            sections.cycles(view),
            sections.step_charts(view),
            sections.grad_norms(data["grad_norms"]),
            sections.config(None if config is None else redacted(config)),
            sections.problems(view),
            sections.footer(view),
        )
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(view.run)} · pawl</title>",
            f"<style>{_asset('page.css')}</style></head>",
            f"<body><main>{body}</main>",
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>{_plotly()}</script>",
            f"<script>{_asset('page.js')}</script>",
            "</body></html>\n",
        )
    )


def page_data(view: RunView, merged: MergedSteps, inputs: RunInputs) -> dict[str, Any]:
    """What the charts draw. Gaps between cycles stay gaps: `spells` and `recomputed` are one series per cycle.

    Checkpoints are marked where they were committed, those that retention has removed since included.
    """
    commits = [event for event in inputs.events if event.kind == "checkpoint_committed"]
    return {
        "kept": _series(thin(merged.kept, MAX_POINTS)),
        "kept_spells": [_series(thin(part, MAX_POINTS)) for part in _by_cycle(merged.kept)],
        "recomputed": [_series(thin(part, MAX_POINTS)) for part in _by_cycle(merged.recomputed)],
        "spells": [_series(thin(part, MAX_POINTS)) for part in _by_cycle(inputs.lines)],
        "validation": {
            "step": [line.step for line in inputs.validation],
            "loss": [line.loss for line in inputs.validation],
            "unix": [line.unix for line in inputs.validation],
        },
        "grad_norms": grad_norm_map(merged.kept),
        "incidents": [
            {
                "unix": i.fault_unix or i.unix,
                "text": html.escape(f"{i.failure_class} {i.level or ''}: {i.message or ''}")[:300]
                + (f"<br>cost {duration(i.cost.total_s)}" if i.cost else ""),
            }
            for i in view.incidents
        ],
        "checkpoints": [
            {"unix": e.unix, "text": f"checkpoint of step {step_of(e):,}<br>{moment_utc(e.unix)}"}
            for e in commits[:: -(-len(commits) // MAX_POINTS) or 1]
        ],
    }


def grad_norm_map(lines: Sequence[StepLine]) -> dict[str, list[Any]]:
    """Gradient norms by block and step, a row for each block; at most MAX_COLUMNS steps, evenly left out."""
    logged = [line for line in lines if line.grad_norms]
    logged = logged[:: -(-len(logged) // MAX_COLUMNS) or 1]
    blocks = list(dict.fromkeys(block for line in logged for block in line.grad_norms or {}))
    return {
        "step": [line.step for line in logged],
        "block": [html.escape(block) for block in blocks],
        "norm": [[(line.grad_norms or {}).get(block) for line in logged] for block in blocks],
    }


def step_of(commit: Event) -> int:
    """The step that a checkpoint_committed event names."""
    step = commit.data.get("step")
    return step if isinstance(step, int) else 0


def thin(lines: Sequence[StepLine], limit: int) -> tuple[StepLine, ...]:
    """At most about `limit` lines: of each stretch the first, the last, and those of lowest and highest loss."""
    if len(lines) <= limit:
        return tuple(lines)
    stretch = -(-len(lines) // max(1, limit // 4))
    found: list[StepLine] = []
    for begin in range(0, len(lines), stretch):
        part = lines[begin : begin + stretch]
        losses = [line.loss or 0.0 for line in part]
        chosen = {0, len(part) - 1, losses.index(min(losses)), losses.index(max(losses))}
        found += [part[i] for i in sorted(chosen)]
    return tuple(found)


def _by_cycle(lines: Iterable[StepLine]) -> list[list[StepLine]]:
    grouped: dict[str, list[StepLine]] = {}
    for line in lines:
        grouped.setdefault(line.epoch.text, []).append(line)
    return [grouped[epoch] for epoch in sorted(grouped)]


def _series(lines: Sequence[StepLine]) -> dict[str, list[Any]]:
    return {
        "step": [line.step for line in lines],
        "tokens": [line.tokens for line in lines],
        "unix": [line.unix for line in lines],
        "loss": [line.loss for line in lines],
        "grad_norm": [line.grad_norm for line in lines],
        "lr": [line.lr for line in lines],
        "tokens_per_s": [line.tokens_per_s for line in lines],
        "mfu": [None if line.mfu is None else 100 * line.mfu for line in lines],
    }


def redacted(config: str) -> str:
    """The YAML with secret variables of `env` as ***. The frozen config holds none; an edited one might.

    Only below an `env:` key: elsewhere `bos_token_id` and `num_key_value_heads` name no secret.
    """
    shown = []
    env_indent: int | None = None
    for line in config.split("\n"):
        indent = len(line) - len(line.lstrip())
        if env_indent is not None and line.strip() and indent <= env_indent:
            env_indent = None
        key, colon, value = line.partition(":")
        secret = env_indent is not None and is_secret(key)
        if key.strip() == "env":
            env_indent, secret = indent, bool(value.strip(" {}"))
        shown.append(f"{key}: ***" if colon and value.strip() and secret else line)
    return "\n".join(shown)


def _json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return resources.files("orchestrator").joinpath("views", "report_page", name).read_text(encoding="utf-8")


def _plotly() -> str:
    """plotly.js as its Python package carries it; the package itself (slow to import) is not needed."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
