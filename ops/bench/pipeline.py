"""Idle share of two pipeline ranks that run 1F1B, against the simulator's with the costs that were measured."""

import statistics
from typing import Any

from ops.bench.clock import Span, clocked
from ops.bench.models import bench_config, engine_of, random_batch
from ops.bench.rows import Row, spread_of
from ops.bench.world import in_world

P, M = 2, 8
POINTS = 10
# Two equal stages: a small vocabulary, or the last one would be the slower by its head.
CONFIG: dict[str, dict[str, Any]] = {
    "mesh": {"pp": P, "pp_engine": "1f1b", "layers_per_stage": [3, 3]},
    "shape": {"num_hidden_layers": 6, "vocab_size": 128, "tie_word_embeddings": True},
    "tokens": {"batch_accumulation_per_replica": M, "micro_batch_size": 2},
}


def spans_of_steps(steps: int) -> list[list[Span]]:
    """On one rank: its computations and waits in each step, after one to warm up."""
    from trainer.engine import Engine
    from trainer.pipeline.engine.interpreter import Interpreter
    from trainer.pipeline.engine.parts import MicroBatch

    config = bench_config(**CONFIG)
    engine, batch = engine_of(config), random_batch(config)
    methods = ((Interpreter, "_forward"), (Interpreter, "_backward"), (MicroBatch, "wait"), (Engine, "_run"))
    every = []
    for step in range(1, steps + 2):
        with clocked(*methods) as spans:
            engine.train_step(batch, lr=1e-4, weight_decay=0.1, adam_t=step)
        every.append(spans)
    return every[1:]


def busy_seconds(spans: list[Span]) -> dict[str, float]:
    """Seconds of computation by kind; a wait inside a forward or backward is none."""
    waits = [span for span in spans if span.name == "wait"]
    busy = {"_forward": 0.0, "_backward": 0.0}
    for span in spans:
        if span.name in busy:
            busy[span.name] += span.seconds
            inside = (wait.seconds for wait in waits if span.start <= wait.start and wait.end <= span.end)
            busy[span.name] -= sum(inside)
    return busy


def idle_share(ranks: list[list[Span]]) -> float:
    """Idle time of all ranks in one step, of the time from the first action to the last."""
    runs = [span for spans in ranks for span in spans if span.name == "_run"]
    makespan = max(run.end for run in runs) - min(run.start for run in runs)
    return 1 - statistics.mean(sum(busy_seconds(spans).values()) for spans in ranks) / makespan


def simulated_share(ranks: list[list[Span]]) -> float:
    """What the simulator says for the mean costs of the ranks, messages free."""
    from trainer.pipeline.generators import make_schedule
    from trainer.pipeline.lower import chain
    from trainer.pipeline.simulate import Costs, simulate

    busy = [busy_seconds(spans) for spans in ranks]
    forward, backward = (statistics.mean(one[name] for one in busy) / M for name in ("_forward", "_backward"))
    costs = Costs(forward=forward, input=backward, weight=0.0)  # a backward has its weight gradients in it
    run = simulate(make_schedule("1f1b", p=P, m=M), chain(P), costs)
    return (run.makespan - run.ideal) / run.makespan


def bubble_row(pairs: int) -> Row:
    """Points of the step that the ranks idle. `ratio`: how far apart, in units of ten points."""
    steps = list(zip(*in_world(P, spans_of_steps, pairs), strict=True))
    measured = [100 * idle_share(list(ranks)) for ranks in steps]
    ours = statistics.median(measured)
    simulated = statistics.median(100 * simulated_share(list(ranks)) for ranks in steps)
    return Row(
        id="bubble-pp2-m8", what=f"idle % of a step, measured and simulated; ratio: how far apart, in {POINTS} points",
        ours=ours, other=simulated, ratio=abs(ours - simulated) / POINTS, spread=spread_of(measured), threads=1,
        shape="pp=2 m=8 1f1b, 3 layers a stage, one core a rank",
    )  # fmt: skip
