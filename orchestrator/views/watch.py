"""`pawl watch`: a run, live. It only looks: nothing here changes a run, and Ctrl-C leaves it going.

On a terminal a picture that is drawn anew every half second: progress, loss, tokens/s, time to go, the phase of every
rank, incidents as they happen and what pawl does about them. Elsewhere (a pipe, a log) plain lines, one for each news.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.views.explain import action_words, place
from orchestrator.views.human import UNKNOWN, duration, harmless, loss, moment, plural, rate, ratio
from orchestrator.views.records import NodeView, RunState, RunView
from orchestrator.views.run_view import run_view
from orchestrator.views.status import state_text, steps_text

REFRESH_S = 0.5
PLAIN_EVERY_S = 10.0
SHOWN_NEWS = 8
_CODES = {RunState.HELD: 3, RunState.FAILED: 1}
_PHASE_STYLES = {"step": "green", "data": "green", "save": "blue", "eval": "cyan", "exit": "dim"}


def run(
    run_dir: Path,
    *,
    console: Console | None = None,
    look: Callable[[Path], RunView] = run_view,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Watch until the run is over: 0, 1 when it FAILED, 3 when it is HELD. Ctrl-C: says that the run goes on; 0."""
    # A pipe gets plain lines even where colour is forced (FORCE_COLOR): its reader wants neither pictures nor controls.
    screen = console or Console(force_terminal=sys.stdout.isatty(), markup=False, emoji=False, highlight=False)
    is_live = screen.is_terminal and not screen.is_dumb_terminal
    try:
        view = _live(run_dir, screen, look, sleep) if is_live else _plain(run_dir, screen, look, sleep)
    except KeyboardInterrupt:
        name = harmless(run_dir.name)
        _say(
            screen,
            f"\nStopped looking; run {name} goes on by itself. `pawl watch {name}` looks again, "
            f"`pawl drain {name}` stops it in order.",
        )
        return 0
    _say(screen, _last_words(view))
    return _CODES.get(view.state, 0)


def _say(screen: Console, line: str) -> None:
    """One whole line, as long as it is."""
    screen.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _live(run_dir: Path, screen: Console, look: Callable[[Path], RunView], sleep: Callable[[float], None]) -> RunView:
    view = look(run_dir)
    with Live(picture(view), console=screen, auto_refresh=False, transient=False) as live:
        while not view.state.is_over:
            began = time.monotonic()
            view = look(run_dir)
            live.update(picture(view), refresh=True)
            # A long run takes its time to be read; looking must not become the load.
            sleep(max(REFRESH_S, 4 * (time.monotonic() - began)))
    return view


def _plain(run_dir: Path, screen: Console, look: Callable[[Path], RunView], sleep: Callable[[float], None]) -> RunView:
    seen: set[str] = set()
    said_at, said_step = -PLAIN_EVERY_S, None
    while True:
        view = look(run_dir)
        for item in news(view):
            if item.key not in seen:
                seen.add(item.key)
                _say(screen, f"{moment(item.unix)[11:]}  {item.text}")
        due = view.now_unix - said_at >= PLAIN_EVERY_S or view.state.is_over
        if due and view.progress.step != said_step:
            said_at, said_step = view.now_unix, view.progress.step
            _say(screen, f"{moment(view.now_unix)[11:]}  {progress_line(view)}")
        if view.state.is_over:
            return view
        sleep(REFRESH_S)


@dataclass(frozen=True, slots=True)
class News:
    """Something that happened, for people. `key` tells two apart."""

    unix: float
    key: str
    text: str


def news(view: RunView) -> tuple[News, ...]:
    """Starts, incidents, what pawl does about them, recoveries, checkpoints set aside; in the order they happened."""
    return tuple(sorted(_news(view), key=lambda item: item.unix))


def _news(view: RunView) -> Iterator[News]:
    for cycle in view.cycles:
        source = cycle.resume_from or "the beginning"
        nodes = ", ".join(cycle.nodes)
        yield News(cycle.started_unix, f"start {cycle.epoch}", f"{cycle.epoch} starts on {nodes} from {source}")
        if cycle.first_step_unix is not None:
            yield News(cycle.first_step_unix, f"run {cycle.epoch}", f"{cycle.epoch} trains")
    for incident in view.incidents:
        where = place(incident)
        text = f"! {incident.failure_class}: {where + ': ' if where else ''}{incident.message or ''}"
        yield News(incident.unix, f"incident {incident.id}", text)
        if incident.cost is not None and incident.recovered_unix is not None:
            lost = f", {plural(incident.cost.lost_steps, 'step')} again" if incident.cost.lost_steps is not None else ""
            text = f"✓ recovered in {duration(incident.cost.total_s)}{lost}"
            yield News(incident.recovered_unix, f"over {incident.id}", text)
    for decision in view.decisions:
        reason = f": {decision.reason}" if decision.reason else ""
        yield News(decision.unix, f"decision {decision.unix} {decision.rule}", f"→ {action_words(decision)}{reason}")
    for request in view.requests:
        asked = f"{request.verb} asked for by {request.by or UNKNOWN}"
        yield News(
            request.unix or 0.0, f"request {request.id}", asked + (f": {request.result}" if request.result else "")
        )


def picture(view: RunView) -> RenderableType:
    """The run as one panel."""
    parts: list[RenderableType] = [_progress(view), _numbers(view)]
    if view.nodes:
        parts += [Text(), grid(view.nodes)]
    recent = news(view)[-SHOWN_NEWS:]
    if recent:
        parts.append(Text())
    parts += [_news_line(item) for item in recent]
    title = Text(view.run, style="bold")
    title.append("  ")
    title.append_text(state_text(view.state))
    if view.state_reason:
        title.append(f"  {view.state_reason}", style="dim")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1))


def _progress(view: RunView) -> RenderableType:
    total, step = view.progress.train_steps, view.progress.step
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    row.add_row(ProgressBar(total=total or 1, completed=step or 0), f"step {steps_text(view)}")
    return row


def _numbers(view: RunView) -> Text:
    progress = view.progress
    facts = [
        f"loss {loss(progress.loss)}",
        rate(progress.tokens_per_s),
        f"MFU {ratio(progress.mfu)}",
        f"to go {duration(progress.eta_s)}",
        f"goodput {ratio(view.goodput.productive_ratio)}",
        plural(len(view.incidents), "incident"),
    ]
    line = Text("   ".join(facts), style="dim" if progress.stale else "default")
    if progress.stale and progress.measured_unix is not None and not view.state.is_over:
        line.append(f"   (last step {duration(view.now_unix - progress.measured_unix)} ago)", style="yellow")
    return line


def grid(nodes: tuple[NodeView, ...]) -> Table:
    """Node × rank: each rank's phase, coloured; a stale node in red."""
    table = Table.grid(padding=(0, 2))
    for node in nodes:
        name = Text(node.name, style="red" if node.stale else "bold" if node.role == "train" else "dim")
        cells: list[RenderableType] = [name]
        if node.role != "train":
            cells.append(Text("hot spare" if node.role == "spare" else node.role, style="dim"))
        for rank in node.ranks:
            phase = rank.phase or UNKNOWN
            cells.append(Text(f"{rank.rank} {phase}", style=_PHASE_STYLES.get(phase.lower(), "yellow")))
        if node.beat_age_s is not None:
            cells.append(Text(f"beat {duration(node.beat_age_s)} ago", style="red" if node.stale else "dim"))
        table.add_row(*cells)
    return table


def _news_line(item: News) -> Text:
    style = {"!": "bold red", "→": "cyan", "✓": "green"}.get(item.text[:1], "dim")
    line = Text(f"{moment(item.unix)[11:]}  ", style="dim")
    return line.append(item.text, style=style)


def progress_line(view: RunView) -> str:
    """One plain line of where the run stands."""
    progress = view.progress
    speed = "" if progress.stale else f", {rate(progress.tokens_per_s)}, {duration(progress.eta_s)} to go"
    return f"{view.state}: step {steps_text(view)}, loss {loss(progress.loss)}{speed}"


def _last_words(view: RunView) -> str:
    reason = f": {view.state_reason}" if view.state_reason else ""
    return f"Run {view.run} is {str(view.state).upper()} at step {steps_text(view)}{reason}"
