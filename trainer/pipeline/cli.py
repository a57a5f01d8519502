"""`python -m trainer schedule`: prints a schedule's grid and its figures."""

import argparse

from trainer.pipeline.lower import chain
from trainer.pipeline.schedule import SCHEDULES, make_schedule
from trainer.pipeline.simulate import grid, simulate
from trainer.pipeline.validate import peak_activations, validate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="1f1b", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("-p", "--stages", type=int, required=True, help="pipeline stages")
    parser.add_argument("-m", "--micro-batches", type=int, required=True, help="micro-batches per step")


def render(name: str, *, p: int, m: int) -> str:
    """Grid, makespan, bubble by both conventions and peak activations. A backward costs two forwards."""
    schedule = make_schedule(name, p=p, m=m)
    lowered = validate(schedule, chain(p), m=m)
    run = simulate(schedule, chain(p))
    messages = sum(action.peer is not None for actions in lowered for action in actions) // 2
    return "\n".join((
        f"{name}  p = {p} stages  m = {m} micro-batches  (F = 1 unit, B = 2 units, messages free)",
        grid(run),
        f"makespan {run.makespan:g} units, ideal {run.ideal:g}",
        f"bubble {run.bubble_of_ideal:.1%} of ideal time, {run.bubble_of_total:.1%} of total time",
        f"peak activations per rank {list(peak_activations(schedule))} micro-batches, {messages} messages per step",
    ))  # fmt: skip


def main(args: argparse.Namespace) -> int:
    try:
        print(render(args.name, p=args.stages, m=args.micro_batches))
    except ValueError as error:
        print(f"schedule: {error}")
        return 2
    return 0
