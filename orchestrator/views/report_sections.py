"""The sections of the report: RunView → HTML. Every text passes `html.escape`; nothing of a run becomes markup."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from orchestrator import __version__
from orchestrator.views.explain import TITLES, action_words, explanation, place
from orchestrator.views.goodput_tape import Category
from orchestrator.views.human import UNKNOWN, count, duration, loss, moment_utc, plural, rate, ratio, size
from orchestrator.views.records import RunState, RunView

COLOURS = {
    Category.PRODUCTIVE: "#2f9e6b",
    Category.PROVISIONAL: "#8fd0b2",
    Category.RECOMPUTE: "#e07b39",
    Category.QUEUE: "#9aa7b5",
    Category.START: "#6b8fd6",
    Category.PREFLIGHT: "#a7bdea",
    Category.RENDEZVOUS: "#4a6cb8",
    Category.RESTORE: "#7d66c4",
    Category.COMPILE: "#b79ae8",
    Category.SAVE_BLOCKING: "#3aa6b9",
    Category.DATA_STALL: "#c9b037",
    Category.EVAL: "#7fb83e",
    Category.HANG: "#d64545",
    Category.RECOVERY: "#b8527e",
    Category.BACKOFF: "#d99ab8",
    Category.HELD: "#6f5147",
    Category.DRAINED: "#a39a8f",
}
MEANINGS = {
    Category.PRODUCTIVE: "steps that a checkpoint holds",
    Category.PROVISIONAL: "steps no checkpoint covers yet",
    Category.RECOMPUTE: "work that was done again",
    Category.QUEUE: "waiting for the job to start",
    Category.START: "starting and stopping processes",
    Category.PREFLIGHT: "checking the nodes",
    Category.RENDEZVOUS: "ranks finding each other",
    Category.RESTORE: "loading a checkpoint",
    Category.COMPILE: "compiling",
    Category.SAVE_BLOCKING: "training waiting for a save",
    Category.DATA_STALL: "training waiting for data",
    Category.EVAL: "held-out loss",
    Category.HANG: "from a fault until noticed",
    Category.RECOVERY: "evidence, teardown, decision",
    Category.BACKOFF: "waiting before a restart",
    Category.HELD: "waiting for a person",
    Category.DRAINED: "drained, until it was resumed",
}


def header(view: RunView) -> str:
    state = f'<span class="pill {view.state}">{escape(str(view.state).upper())}</span>'
    reason = f'<span class="soft">{escape(view.state_reason)}</span>' if view.state_reason else ""
    project = f'<span class="soft">{escape(view.project)}</span>' if view.project else ""
    return f"<header><h1>{escape(view.run)}</h1>{state}{project}{reason}</header>"


def facts(view: RunView) -> str:
    progress, mesh = view.progress, view.mesh
    total = f" of {progress.train_steps:,}" if progress.train_steps is not None else ""
    rows = [
        ("steps", f"{count(progress.step)}{total}"),
        ("tokens", count(progress.tokens)),
        ("loss", loss(progress.loss)),
        ("held-out loss", loss(progress.validation_loss)),
        ("speed", rate(progress.tokens_per_s)),
        ("MFU", ratio(progress.mfu)),
        ("goodput", ratio(view.goodput.productive_ratio)),
        ("wall time", duration(view.goodput.wall_s)),
        ("restarts", str(sum(i.cost is not None for i in view.incidents))),
        ("parameters", count(view.num_params)),
        ("ranks", f"{view.world_size or UNKNOWN}" + (f" = dp {mesh.dp} · pp {mesh.pp} · tp {mesh.tp}" if mesh else "")),
        ("compute", view.compute_dtype or UNKNOWN),
        ("started (UTC)", moment_utc(view.created_unix)),
        ("ended (UTC)" if view.state.is_over else "seen (UTC)", moment_utc(view.ended_unix or view.now_unix)),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in rows)
    return f'<section><dl class="facts">{cells}</dl></section>'


def answers(view: RunView) -> str:
    rows = zip(TITLES, explanation(view).lines, strict=True)
    cells = "".join(f"<dt>{escape(title)}</dt><dd>{escape(line)}</dd>" for title, line in rows)
    return f'<section><dl class="answers">{cells}</dl></section>'


def loss_chart(view: RunView) -> str:
    buttons = "".join(
        f'<button data-axis="{axis}" aria-pressed="{"true" if axis == "step" else "false"}">{name}</button>'
        for axis, name in (("step", "steps"), ("tokens", "tokens"), ("time", "time"))
    )
    again = view.progress.recomputed_steps
    note = f"Faint: {plural(again, 'step')} trained again after a restart. " if again else ""
    note += "On the time axis triangles mark incidents, diamonds checkpoints."
    return (
        f'<section><div class="switch" role="group" aria-label="horizontal axis">{buttons}</div><h2>Loss</h2>'
        f'<div id="loss" class="chart"></div><p class="note">{escape(note)}</p></section>'
    )


def speed_charts(view: RunView) -> str:
    chart = '<h2>Tokens per second</h2><div id="speed" class="chart small"></div>'
    if view.progress.mfu is None:
        text = (
            "Model FLOPs utilisation (MFU) is unknown here: the peak speed of this device is not known "
            "(CPUs have no entry in the table), and pawl does not guess one."
        )
        return f'<section>{chart}<p class="note">{escape(text)}</p></section>'
    three = (
        f"Median of the last steps: {ratio(view.progress.mfu)} (exact causal pairs), "
        f"{ratio(view.progress.mfu_full_attn)} (full attention), {ratio(view.progress.mfu_megatron)} (Megatron's)."
    )
    mfu = '<div id="mfu" class="chart small"></div>'
    note = f'<p class="note">{escape(three)}</p>'
    utilisation = f"<h2>Model FLOPs utilisation (MFU)</h2>{mfu}{note}"
    return f'<div class="pair"><section>{chart}</section><section>{utilisation}</section></div>'


def step_charts(view: RunView) -> str:
    del view
    rate_chart = '<section><h2>Learning rate</h2><div id="rate" class="chart small"></div></section>'
    norm_chart = '<section><h2>Gradient norm</h2><div id="norm" class="chart small"></div></section>'
    return f'<div class="pair">{rate_chart}{norm_chart}</div>'


def grad_norms(table: Mapping[str, Sequence[object]]) -> str:
    """Where each block's gradient norm is on record: block × step."""
    if not table["step"]:
        return ""
    note = "Before clipping; dark is small. `logging.grad_norms_interval` and `pawl profile` put them on record."
    chart = '<div id="blocks" class="chart"></div>'
    return f'<section><h2>Gradient norm of each block</h2>{chart}<p class="note">{escape(note)}</p></section>'


def goodput(view: RunView) -> str:
    book = view.goodput
    taken = [category for category in COLOURS if book.seconds[category] > 0]
    spans, items = [], []
    for category in taken:
        seconds, share = book.seconds[category], book.seconds[category] / book.wall_s
        name = category.replace("_", " ")
        title = f"{name}: {duration(seconds)}, {ratio(share)} ({MEANINGS[category]})"
        style = f"background:{COLOURS[category]}"
        spans.append(f'<span style="{style};flex:{seconds:.6f}" title="{escape(title)}"></span>')
        items.append(
            f'<li title="{escape(MEANINGS[category])}"><i style="{style}"></i><span>{escape(name)}</span>'
            f"<b>{escape(duration(seconds))}</b><em>{escape(ratio(share))}</em></li>"
        )
    note = (
        f"The parts sum to the wall time, {duration(book.wall_s)}. Goodput {ratio(book.productive_ratio)} of it; "
        f"{ratio(book.ettr)} without the queue. Rank-seconds in all: {count(sum(book.rank_seconds.values()))}."
    )
    return (
        f'<section><h2>Where the time went</h2><div class="bar">{"".join(spans)}</div>'
        f'<ul class="legend">{"".join(items)}</ul><p class="note">{escape(note)}</p></section>'
    )


def incidents(view: RunView) -> str:
    if not view.incidents:
        return '<section><h2>Incidents</h2><p class="soft">None.</p></section>'
    rows = []
    for incident in view.incidents:
        cost = incident.cost
        parts = (cost.detection_s, cost.teardown_s, cost.start_s, cost.load_s, cost.total_s) if cost else (None,) * 5
        lost = None if cost is None else cost.lost_steps
        rows.append(
            [
                _td(moment_utc(incident.unix)[11:], "tight"),
                _td(incident.failure_class or "unknown", "bad"),
                _td(place(incident) or UNKNOWN),
                _td(incident.message or UNKNOWN),
                _td(incident.level or UNKNOWN),
                *(_td(duration(part), "num") for part in parts),
                _td(count(lost), "num"),
            ]
        )
    heads = ["time (UTC)", "class", "where", "what", "level"]
    numeric = ["detection", "teardown", "start", "load", "whole cost", "steps again"]
    return f"<section><h2>Incidents</h2>{_table(heads, rows, numeric)}</section>"


def decisions(view: RunView) -> str:
    if not view.decisions:
        return ""
    rows = [
        [
            _td(moment_utc(decision.unix)[11:], "tight"),
            f'<td class="tight"><code>{escape(decision.rule or UNKNOWN)}</code></td>',
            _td(action_words(decision)),
            _td(decision.reason or UNKNOWN),
        ]
        for decision in view.decisions
    ]
    return f"<section><h2>Decisions</h2>{_table(['time (UTC)', 'rule', 'what pawl did', 'because'], rows)}</section>"


def checkpoints(view: RunView) -> str:
    if not view.checkpoints:
        return '<section><h2>Checkpoints</h2><p class="soft">None.</p></section>'
    rows = [
        [
            f'<td class="tight"><code>{escape(checkpoint.name)}</code></td>',
            _td("yes", "yes") if checkpoint.counts else _td(f"no: {checkpoint.why_not}", "no"),
            _td(moment_utc(checkpoint.committed_unix)),
            _td(f"{checkpoint.step:,}", "num"),
            _td(size(checkpoint.bytes), "num"),
        ]
        for checkpoint in view.checkpoints
    ]
    heads = ["name", "counts", "committed (UTC)"]
    return f"<section><h2>Checkpoints</h2>{_table(heads, rows, ['step', 'size'])}</section>"


def cycles(view: RunView) -> str:
    if not view.cycles:
        return ""
    rows = []
    for cycle in view.cycles:
        lasted = (cycle.ended_unix or view.now_unix) - cycle.started_unix
        running = "running" if not view.state.is_over else UNKNOWN
        rows.append(
            [
                f'<td class="tight"><code>{escape(cycle.epoch)}</code></td>',
                _td(moment_utc(cycle.started_unix), "tight"),
                _td(", ".join(cycle.nodes) or UNKNOWN),
                _td(cycle.resume_from or "the beginning"),
                _td(cycle.outcome or running),
                _td(duration(lasted), "num"),
                _td(count(cycle.last_step), "num"),
            ]
        )
    heads = ["launch", "started (UTC)", "nodes", "resumed from", "ended as"]
    return f"<section><h2>Launches</h2>{_table(heads, rows, ['lasted', 'last step'])}</section>"


def config(text: str | None) -> str:
    if text is None:
        return ""
    return f"<section><details><summary>Config</summary><pre>{escape(text)}</pre></details></section>"


def problems(view: RunView) -> str:
    if not view.problems:
        return ""
    items = "".join(f"<p>{escape(problem)}</p>" for problem in view.problems)
    return f"<section><h2>Could not be read</h2>{items}</section>"


def footer(view: RunView) -> str:
    over = "" if view.state in (RunState.DONE, RunState.FAILED) else " The run may have moved on since."
    return f"<footer>pawl {escape(__version__)}, {escape(moment_utc(view.now_unix))} UTC.{over}</footer>"


def _td(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()) -> str:
    names = "".join(f"<th>{escape(head)}</th>" for head in heads)
    names += "".join(f'<th class="num">{escape(head)}</th>' for head in numeric)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
