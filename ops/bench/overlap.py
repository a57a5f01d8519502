"""Seconds of steps on two dp ranks: reductions and gathers behind computation, against all of them after it."""

import statistics
from typing import Any

from ops.bench.models import bench_config, engine_of, random_batch
from ops.bench.rows import Row, fastest, spread_of
from ops.bench.world import in_world

# Many parameters for few tokens, in several buckets: messages take a good part of the step.
CONFIG: dict[str, dict[str, Any]] = {
    "mesh": {"dp": 2},
    "shape": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6},
    "tokens": {"micro_batch_size": 1, "batch_accumulation_per_replica": 1},
}
BUCKET_NUMEL = 1 << 21
STEPS = 2  # a turn: the gathers of the last are waited for in it


def step_times(pairs: int) -> list[tuple[float, float]]:
    """On one rank: (seconds with overlap, without) of each pair."""
    config = bench_config(**CONFIG)
    engine, batch = engine_of(config, bucket_numel=BUCKET_NUMEL), random_batch(config)
    count = iter(range(1, 1 << 30))

    def step() -> None:
        engine.train_step(batch, lr=1e-4, weight_decay=0.1, adam_t=next(count))

    def behind() -> None:
        for _ in range(STEPS):
            step()
        engine.optimizer.wait_weights()

    def after() -> None:
        """A step that nobody told the order of its buckets starts none early."""
        begin, engine.watch.begin = engine.watch.begin, lambda order: None  # type: ignore[method-assign]
        try:
            for _ in range(STEPS):
                step()
                engine.optimizer.wait_weights()
        finally:
            engine.watch.begin = begin  # type: ignore[method-assign]

    fastest(behind, after, turns=1)
    times = [fastest(behind, after, turns=1) for _ in range(pairs)]  # a turn is two steps already
    return [(mine, theirs) for mine, theirs in times]


def overlap_row(pairs: int) -> Row:
    """The slower rank of each turn decides; both run the same turns."""
    ranks = in_world(2, step_times, pairs)
    times = [tuple(map(max, zip(*pair, strict=True))) for pair in zip(*ranks, strict=True)]
    ratios = [mine / theirs for mine, theirs in times]
    return Row(
        id="overlap-dp2", what="seconds of two steps with reductions and gathers behind computation, against after it",
        ours=statistics.median(mine for mine, _ in times), other=statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(ratios), spread=spread_of(ratios), threads=1,
        shape="dp=2 ZeRO-1 hidden=512 layers=6 tokens=256 a rank, buckets of 2 Mi elements, gloo, one core a rank",
    )  # fmt: skip
