"""`pawl status`: one run in full, or all runs in a table. RunView → text; nothing is read here."""

import io
import shutil
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.views.explain import place
from orchestrator.views.goodput_tape import Category
from orchestrator.views.human import UNKNOWN, count, duration, loss, moment, number, plural, rate, ratio, size
from orchestrator.views.records import CheckpointView, CopiesView, IncidentView, NodeView, RunState, RunView

_STYLES = {
    RunState.TRAINING: "green",
    RunState.DONE: "bold green",
    RunState.RECOVERING: "yellow",
    RunState.STARTING: "yellow",
    RunState.HELD: "bold red",
    RunState.FAILED: "bold red",
    RunState.LOST: "red",
}
SHOWN_CHECKPOINTS = 5
SHOWN_INCIDENTS = 10


def render(view: RunView, *, width: int | None = None, colour: bool | None = None) -> str:
    """One run in full, as text for a terminal of `width` columns (its own width by default)."""
    return _text([facts_table(view), *_sections(view)], width=width, colour=colour)


def render_list(views: Iterable[RunView], *, width: int | None = None, colour: bool | None = None) -> str:
    """A line for each run, the running ones first."""
    return _text([fleet_table(tuple(views))], width=width, colour=colour)


def fleet_table(views: Sequence[RunView]) -> Table:
    """The fleet as a table."""
    table = _table("run", "state", "step", "loss", "tokens/s", "to go", "goodput", "incidents", "nodes")
    for view in sorted(views, key=lambda v: (v.state.is_over, -(v.created_unix or 0.0), v.run)):
        progress = view.progress
        table.add_row(
            Text(view.run),
            state_text(view.state),
            steps_text(view),
            loss(progress.loss),
            UNKNOWN if progress.stale else count(progress.tokens_per_s),
            duration(progress.eta_s),
            ratio(view.goodput.productive_ratio),
            str(len(view.incidents)),
            str(sum(node.role == "train" for node in view.nodes) or UNKNOWN),
        )
    return table


def facts_table(view: RunView) -> Table:
    """What the run is and how it stands, two columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts(view):
        table.add_row(name, value)
    return table


def _facts(view: RunView) -> list[tuple[str, RenderableType]]:
    progress, mesh = view.progress, view.mesh
    old = "  (last measured, not now)" if progress.stale else ""
    state = state_text(view.state)
    if view.state_reason:
        state.append(f"  {view.state_reason}", style="default")
    ranks = UNKNOWN + " ranks" if view.world_size is None else plural(view.world_size, "rank")
    layout = UNKNOWN if mesh is None else f"dp {mesh.dp} × pp {mesh.pp} × tp {mesh.tp}, {ranks}"
    facts: list[tuple[str, RenderableType]] = [
        ("run", Text(view.run, style="bold")),
        ("state", state),
        ("step", f"{steps_text(view)}   {count(progress.tokens)} tokens"),
        ("loss", f"{loss(progress.loss)}   learning rate {number(progress.lr, 3)}{old}"),
        ("speed", f"{rate(progress.tokens_per_s)}   MFU {ratio(progress.mfu)}   to go {duration(progress.eta_s)}{old}"),
        ("model", f"{count(view.num_params)} parameters, {view.compute_dtype or UNKNOWN}, {layout}"),
        ("wall time", f"{duration(view.goodput.wall_s)}   goodput {ratio(view.goodput.productive_ratio)}"),
        ("where it went", goodput_text(view)),
        (
            "attempts",
            f"{len(view.attempts)}, {plural(len(view.cycles), 'cycle')}   launcher {view.launcher or UNKNOWN}",
        ),
    ]
    if progress.validation_loss is not None:
        facts.insert(4, ("held-out loss", loss(progress.validation_loss)))
    if view.lineage is not None:
        facts.insert(2, ("forked from", Text(view.lineage.text)))
    if view.lost_spares:
        facts.append(("hot spares", Text("\n".join(view.lost_spares), style="yellow")))
    if view.copies is not None:
        facts.append(("copies", copies_text(view.copies)))
    if view.profiles:
        more = f"  (and {len(view.profiles) - 1} before)" if len(view.profiles) > 1 else ""
        facts.append(("profile", Text(f"{view.run_dir}/{view.profiles[-1]}{more}", overflow="fold")))
    if view.metrics_addresses:
        facts.append(("metrics", "  ".join(f"http://{address}/metrics" for address in view.metrics_addresses)))
    if view.stop is not None and view.stop.hint:
        facts.append(("hint", Text(view.stop.hint)))
    return facts


def _sections(view: RunView) -> list[RenderableType]:
    sections: list[RenderableType] = []
    if view.nodes:
        sections += [Text(), nodes_table(view.nodes)]
    if view.incidents:
        sections += [Text(), incidents_table(view.incidents[-SHOWN_INCIDENTS:])]
    if view.checkpoints:
        sections += [Text(), checkpoints_table(view.checkpoints[:SHOWN_CHECKPOINTS])]
    for problem in view.problems:
        sections.append(Text(f"could not be read: {problem}", style="yellow"))
    return sections


def nodes_table(nodes: Sequence[NodeView]) -> Table:
    """Nodes × ranks: phase and step of each."""
    table = _table("node", "role", "last beat", "ranks")
    for node in nodes:
        beat = Text(duration(node.beat_age_s), style="red" if node.stale else "default")
        ranks = ", ".join(
            f"{rank.rank}: {rank.phase or UNKNOWN}" + (f" {rank.step}" if rank.step is not None else "")
            for rank in node.ranks
        )
        table.add_row(Text(node.name), node.role, beat, ranks or UNKNOWN)
    return table


def incidents_table(incidents: Sequence[IncidentView]) -> Table:
    """Incidents with their class, place, level and cost."""
    table = _table("incident", "class", "where", "level", "cost", "steps lost")
    for incident in incidents:
        cost = incident.cost
        table.add_row(
            moment(incident.unix)[11:],
            Text(incident.failure_class or "unknown"),
            Text(place(incident)),
            incident.level or UNKNOWN,
            duration(cost.total_s) if cost else "not settled",
            count(cost.lost_steps) if cost else UNKNOWN,
        )
    return table


def checkpoints_table(checkpoints: Sequence[CheckpointView]) -> Table:
    """Checkpoints, newest first, and why some do not count."""
    table = _table("checkpoint", "step", "size", "counts")
    for checkpoint in checkpoints:
        counts = Text("yes", style="green") if checkpoint.counts else Text(f"no: {checkpoint.why_not}", style="yellow")
        table.add_row(Text(checkpoint.name), f"{checkpoint.step:,}", size(checkpoint.bytes), counts)
    return table


def copies_text(copies: CopiesView) -> Text:
    """`4 at s3://bucket/demo, the newest of step 40`, and what failed since."""
    text = Text("none yet" if not copies.count else f"{copies.count} at {copies.place or UNKNOWN}", overflow="fold")
    if copies.newest_step is not None:
        text.append(f", the newest of step {copies.newest_step:,}")
    for failure in copies.failed:
        text.append(f"\n{failure}", style="yellow")
    return text


def state_text(state: RunState) -> Text:
    return Text(str(state).upper(), style=_STYLES.get(state, "default"))


def steps_text(view: RunView) -> str:
    """12,500 / 100,000"""
    step, total = view.progress.step, view.progress.train_steps
    return f"{count(step)} / {count(total)}"


def goodput_text(view: RunView) -> str:
    """The categories that took time, largest first; nothing before a first step has shown what the start was."""
    if view.goodput.productive_ratio is None:
        return "shown from the first step on"
    seconds = view.goodput.seconds
    taken = sorted((c for c in Category if seconds[c] > 0), key=lambda c: seconds[c], reverse=True)
    return ", ".join(f"{str(c).replace('_', ' ')} {duration(seconds[c])}" for c in taken) or UNKNOWN


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(parts: Sequence[RenderableType], *, width: int | None, colour: bool | None) -> str:
    columns = width or shutil.get_terminal_size((120, 24)).columns
    wish = {} if colour is None else {"force_terminal": colour, "no_color": not colour}
    real = Console()
    console = Console(
        file=io.StringIO(),
        width=columns,
        force_terminal=wish.get("force_terminal", real.is_terminal),
        no_color=wish.get("no_color", real.no_color),
        highlight=False,
        markup=False,  # [/x] and :x: in somebody's text are text
        emoji=False,
        soft_wrap=False,
    )
    for part in parts:
        console.print(part)
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue().rstrip("\n")
