"""What a person sees of a schedule: the grid in the terminal and the picture in a browser. Pure but for plotly.js."""

import json
from fractions import Fraction
from html import escape
from importlib import resources
from math import gcd
from typing import Any

from trainer.pipeline.schedule import Action, Op, Placement
from trainer.pipeline.simulate import Costs, Simulation, Span

_MAX_DENOMINATOR = 60


def grid(simulation: Simulation, placement: Placement, costs: Costs, *, width: int | None = None) -> str:
    """One line per rank, one column per time unit; what takes several units fills several columns, `·` is idle.

    The unit is the greatest common one of the costs of a stage. `width`: fold the lines after that many characters.
    """
    unit = time_unit(costs, placement.v)
    columns = round(simulation.makespan / unit)
    rows = [_row(spans, columns, unit, placement) for spans in simulation.spans]
    cell = 1 + max(len(text) for row in rows for text in row)
    head = len(f"rank {len(rows) - 1}  ")
    per_line = columns if width is None else max(1, (width - head) // cell)
    blocks = []
    for first in range(0, columns, per_line):
        lines = [
            f"rank {rank}".ljust(head) + "".join(text.ljust(cell) for text in row[first : first + per_line]).rstrip()
            for rank, row in enumerate(rows)
        ]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def time_unit(costs: Costs, v: int) -> float:
    """The greatest common unit of what a stage's actions take; costs are rounded to 60ths for it."""
    parts = [Fraction(c).limit_denominator(_MAX_DENOMINATOR) / v for c in (costs.forward, costs.input, costs.weight)]
    numbers = [part for part in parts if part > 0]
    denominator = 1
    for number in numbers:
        denominator = denominator * number.denominator // gcd(denominator, number.denominator)
    common = gcd(*(int(number * denominator) for number in numbers)) if numbers else 1
    return float(Fraction(common, denominator)) if numbers else min(costs.forward, costs.input, costs.weight) or 1.0


def _row(spans: tuple[Span, ...], columns: int, unit: float, placement: Placement) -> list[str]:
    cells = ["·"] * columns
    for span in spans:
        for column in range(round(span.start / unit), min(columns, round(span.end / unit))):
            cells[column] = label(span.action, placement)
    return cells


def label(action: Action, placement: Placement) -> str:
    """What a cell says: the stage is left out where a rank has only one."""
    return f"{action.op}{action.micro_batch}" if placement.v == 1 else str(action)


# F blue, the backward family warm and green: far apart also for the colour-blind (palette of Okabe and Ito).
_COLOURS = {Op.F: (0, 114, 178), Op.B: (0, 158, 115), Op.I: (230, 159, 0), Op.W: (204, 121, 167)}
_NAMES = {
    Op.F: "F forward", Op.B: "B backward (input and weights)", Op.I: "I gradient of the input",
    Op.W: "W gradient of the weights",
}  # fmt: skip
_ROW_PX = 46


def html_page(simulation: Simulation, placement: Placement, *, title: str, figures: str) -> str:
    """One self-contained page: bars on a time axis, a row per rank; the later stages of a rank are lighter."""
    traces = [_trace(op, order, simulation, placement) for op in _COLOURS for order in range(placement.v)]
    rows = [f"rank {rank}" for rank in range(placement.p)]
    layout = {
        "barmode": "overlay", "bargap": 0.12, "hovermode": "closest",
        "height": 130 + _ROW_PX * len(rows), "margin": {"l": 70, "r": 20, "t": 40},
        "xaxis": {"title": {"text": "time units"}, "range": [0, simulation.makespan]},
        "yaxis": {"categoryorder": "array", "categoryarray": rows[::-1]},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"}, "plot_bgcolor": "#f2f2f2",
        "font": {"family": "system-ui, sans-serif"}, "uniformtext": {"minsize": 8, "mode": "hide"},
    }  # fmt: skip
    data = json.dumps({"data": [trace for trace in traces if trace["y"]], "layout": layout}).replace("</", "<\\/")
    plotly = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        "<style>body{font-family:system-ui,sans-serif;margin:1.5rem}pre{font-size:.9rem}</style></head>\n"
        f'<body><h1>{escape(title)}</h1>\n<div id="grid"></div>\n<pre>{escape(figures)}</pre>\n'
        f'<script type="application/json" id="figure">{data}</script>\n<script>{plotly}</script>\n<script>\n'
        'const figure = JSON.parse(document.getElementById("figure").textContent);\n'
        'Plotly.newPlot("grid", figure.data, figure.layout, {responsive: true, displaylogo: false});\n'
        "</script></body></html>\n"
    )


def _trace(op: Op, order: int, simulation: Simulation, placement: Placement) -> dict[str, Any]:
    """plotly's bar trace of one kind of action on the `order`-th stage of every rank."""
    stages = {stages[order] for rank in range(placement.p) if len(stages := placement.stages_of(rank)) > order}
    found = [
        (rank, span)
        for rank, spans in enumerate(simulation.spans)
        for span in spans
        if span.action.op is op and span.action.stage in stages
    ]
    white = 0.0 if placement.v == 1 else 0.55 * order / (placement.v - 1)
    colour = ",".join(str(round(c + (255 - c) * white)) for c in _COLOURS[op])
    return {
        "type": "bar", "orientation": "h", "name": _NAMES[op], "legendgroup": op, "showlegend": order == 0,
        "y": [f"rank {rank}" for rank, _ in found],
        "base": [span.start for _, span in found],
        "x": [span.end - span.start for _, span in found],
        "marker": {"color": f"rgb({colour})", "line": {"color": "white", "width": 1}},
        "text": [str(span.action.micro_batch) for _, span in found],
        "textposition": "inside", "insidetextanchor": "middle", "textangle": 0,
        "textfont": {"color": "white" if white < 0.3 else "#222"},
        "hovertext": [
            f"{span.action}: {_NAMES[op]}<br>stage {span.action.stage}, micro-batch {span.action.micro_batch}"
            f"<br>rank {rank}, from {span.start:g} to {span.end:g}"
            for rank, span in found
        ],
        "hoverinfo": "text",
    }  # fmt: skip
