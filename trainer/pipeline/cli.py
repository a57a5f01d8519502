"""`python -m trainer schedule`: prints a schedule's grid and its figures, or draws it."""

import argparse
import shutil
import sys
from pathlib import Path

from trainer.pipeline.choose import read_schedule
from trainer.pipeline.generators import GENERATORS, make_schedule
from trainer.pipeline.grid import grid, html_page
from trainer.pipeline.lower import chain
from trainer.pipeline.schedule import Schedule, ScheduleError
from trainer.pipeline.simulate import Costs, Simulation, simulate, unsynchronised_period
from trainer.pipeline.text import format_csv
from trainer.pipeline.validate import Peaks, peaks, validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default=None, help=f"one of {', '.join(GENERATORS)} (default 1f1b)")
    parser.add_argument("-p", "--ranks", type=int, default=None, help="pipeline ranks")
    parser.add_argument("-m", "--micro-batches", type=int, default=None, help="micro-batches per step")
    parser.add_argument(
        "-v", "--virtual-stages", type=int, default=None, help="stages per rank (default 1; interleaved and zb-v: 2)"
    )
    parser.add_argument(
        "--file", type=Path, default=None, metavar="FILE",
        help="a schedule of your own instead: one line per rank, such as `0F0 0F1 0B0 0B1`, or torch's CSV",
    )  # fmt: skip
    parser.add_argument(
        "--costs", type=_costs, default=Costs(), metavar="F,B,W",
        help="what a micro-batch costs on a rank: forward, gradient of the input, of the weights (default 1,1,1)",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="draw it in one self-contained page")
    parser.add_argument("--csv", action="store_true", help="print the schedule as torch's pipelining does, and no more")
    parser.epilog = "\n".join((
        parser.epilog or "",
        "  python -m trainer schedule --name interleaved -p 4 -m 8 -v 2 --costs 1,1.1,0.9 --html schedule.html",
        "  python -m trainer schedule --name 1f1b -p 2 -m 4 --csv > mine.csv",
        "  python -m trainer schedule --file mine.csv",
    ))  # fmt: skip


def _costs(text: str) -> Costs:
    parts = text.split(",")
    try:
        forward, of_input, weight = (float(part) for part in parts)
        if (
            not all(0 <= cost < float("inf") for cost in (forward, of_input, weight))
            or forward + of_input + weight == 0
        ):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three costs; expected forward,input,weight ≥ 0 and not all 0, such as 1,1.2,0.8"
        ) from None
    return Costs(forward=forward, input=of_input, weight=weight)


def figures(schedule: Schedule, run: Simulation, costs: Costs, messages: int) -> str:
    """Sizes, the step's time and bubble with and without the clipping barrier, and what each rank holds."""
    placement, held = schedule.placement, peaks(schedule)
    free = unsynchronised_period(schedule, chain(placement.num_stages), costs)
    return "\n".join((
        f"{schedule.name}: p = {schedule.p} ranks, {placement.num_stages} stages, m = {schedule.m} micro-batches; "
        f"costs F {costs.forward:g}, I {costs.input:g}, W {costs.weight:g}, B = I + W, messages free",
        f"ideal {run.ideal:g} units; {messages} messages per step",
        f"step {run.makespan:g} units, all ranks waiting for the gradient norm: {_bubble(run.makespan, run.ideal)}",
        f"step {free:g} units without that barrier: {_bubble(free, run.ideal)}",
        *_held(held, placement.v),
    ))  # fmt: skip


def _bubble(time: float, ideal: float) -> str:
    """Both customary ratios: idle time by busy time, and by the whole."""
    return f"bubble {(time - ideal) / ideal:.1%} of ideal time, {(time - ideal) / time:.1%} of total time"


def _held(held: Peaks, v: int) -> list[str]:
    """Peaks per rank in micro-batches through the rank's whole share, which is v stages."""
    rows = {
        "most activations (F to I or B)": held.activations,
        "most pending weight gradients (I to W)": held.pending,
        "most of both together": held.together,
    }
    return [
        f"per rank, {what}: {' '.join(f'{n / v:g}' for n in counts)} micro-batches"
        for what, counts in rows.items()
        if any(counts) and (held.pending != (0,) * len(counts) or counts is held.activations)
    ]


def chosen(args: argparse.Namespace) -> Schedule:
    """The schedule that the command line names. Raises ScheduleError."""
    if args.file is None:
        if args.name not in (None, *GENERATORS):
            raise ScheduleError(f"unknown schedule {args.name!r}; known: {', '.join(GENERATORS)}")
        if args.ranks is None or args.micro_batches is None:
            raise ScheduleError("-p (ranks) and -m (micro-batches) are needed, or --file with a schedule of your own")
        return make_schedule(args.name or "1f1b", p=args.ranks, m=args.micro_batches, v=args.virtual_stages)
    if args.name is not None:
        raise ScheduleError("--name and --file are two schedules; give one of them")
    schedule = read_schedule(args.file)
    wanted = {"-p": args.ranks, "-m": args.micro_batches, "-v": args.virtual_stages}
    held = {"-p": schedule.p, "-m": schedule.m, "-v": schedule.placement.v}
    for flag, value in wanted.items():
        if value not in (None, held[flag]):
            raise ScheduleError(f"{flag} is {value}, but {args.file} has {held[flag]}; leave {flag} away")
    return schedule


def main(args: argparse.Namespace) -> int:
    """Print, and draw with --html. 0, or 2 for a schedule that cannot be."""
    try:
        schedule = chosen(args)
        links = chain(schedule.placement.num_stages)
        lowered = validate(schedule, links)
    except ScheduleError as error:
        print(f"trainer schedule: {error}", file=sys.stderr)
        return 2
    if args.csv and args.html is None:
        sys.stdout.write(format_csv(schedule))
        return 0
    run = simulate(schedule, links, args.costs)
    messages = sum(action.peer is not None for actions in lowered.lists for action in actions) // 2
    text = figures(schedule, run, args.costs, messages)
    if args.html is not None:
        page = html_page(run, schedule.placement, title=f"Pipeline schedule {schedule.name}", figures=text)
        try:
            args.html.write_text(page, encoding="utf-8")
        except OSError as error:
            print(f"trainer schedule: {args.html} cannot be written: {error}", file=sys.stderr)
            return 1
    if args.csv:
        sys.stdout.write(format_csv(schedule))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(f"{grid(run, schedule.placement, args.costs, width=width)}\n\n{text}")
    if args.html is not None:
        print(f"drawn in {args.html}")
    return 0
