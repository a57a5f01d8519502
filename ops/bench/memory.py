"""Peak of live bytes of a step against what `check` predicts, rank by rank, over layouts that fit a small machine."""

import math
from dataclasses import dataclass, field
from typing import Any

from ops.bench.live import lived_in, settled
from ops.bench.models import bench_config, engine_of, random_batch
from ops.bench.rows import Row
from ops.bench.world import in_world
from trainer.activations import CPU
from trainer.config.model import Config
from trainer.engine import Engine
from trainer.memory import RankMemory, memory_of_ranks, topology_of

TOLERANCE_BYTES = 4 << 20
SMALLEST_PEAK = 64 << 20
STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One config by what differs from `bench_config`'s."""

    name: str
    mesh: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh.get(axis, 1) for axis in ("dp", "pp", "tp"))

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """The arguments of `bench_config`."""
        names = ("mesh", "shape", "tokens", "model", "optimizer")
        return {name: dict(getattr(self, name)) for name in names}


SP = {"tp_mode": "REDUCE_SCATTER"}
WIDE = {"hidden_size": 512, "intermediate_size": 1376}
FOUR = {"batch_accumulation_per_replica": 4, "micro_batch_size": 2}
# A CPU without bfloat16 units takes a hundred times as long for its products.
BF16 = {"dtype": "bfloat16"}
FEW = {"batch_accumulation_per_replica": 1, "micro_batch_size": 1}
LAYOUTS = (
    Layout(name="plain"),
    Layout(
        name="bf16, recomputed", model={**BF16, "recompute": "full"}, tokens=FEW,
        shape={"vocab_size": 512, "num_hidden_layers": 8},
    ),
    Layout(name="tied, V 32k", shape={"vocab_size": 32000, "tie_word_embeddings": True, "num_hidden_layers": 2}),
    Layout(name="dp 2, ZeRO-1", mesh={"dp": 2}, tokens={"micro_batch_size": 2}),
    Layout(
        name="dp 2, ZeRO-0, bf16", mesh={"dp": 2}, model=BF16, optimizer={"zero_stage": 0}, tokens=FEW,
        shape={"vocab_size": 512, "num_hidden_layers": 8},
    ),
    Layout(
        name="pp 2, 1f1b, every other layer recomputed", mesh={"pp": 2, "pp_engine": "1f1b"},
        model={"recompute": "selective", "recompute_interval": 2}, shape={"num_hidden_layers": 8}, tokens=FOUR,
    ),
    Layout(name="pp 2, zb-h1", mesh={"pp": 2, "pp_engine": "zb-h1"}, shape={"num_hidden_layers": 6}, tokens=FOUR),
    Layout(
        name="pp 2, interleaved, recomputed", mesh={"pp": 2, "pp_engine": "interleaved", "virtual_stages": 2},
        shape={"num_hidden_layers": 8}, model={"recompute": "full"}, tokens=FOUR,
    ),
    Layout(
        name="pp 2, afab, tied", mesh={"pp": 2, "pp_engine": "afab"}, shape={"tie_word_embeddings": True}, tokens=FOUR
    ),
    Layout(name="tp 2", mesh={"tp": 2}, shape=WIDE, tokens={"micro_batch_size": 2}),
    Layout(name="tp 2, sequence parallel", mesh={"tp": 2, **SP}, shape=WIDE, tokens={"micro_batch_size": 2}),
    Layout(
        name="dp 2 tp 2, sequence parallel, recomputed", mesh={"dp": 2, "tp": 2, **SP}, shape=WIDE,
        model={"recompute": "selective"}, tokens={"micro_batch_size": 2},
    ),
    Layout(
        name="dp 2 pp 2, document masks", mesh={"dp": 2, "pp": 2}, shape={"num_hidden_layers": 6},
        tokens={**FOUR, "document_masks": True},
    ),
    Layout(
        name="pp 2 tp 2, zb-v", mesh={"pp": 2, "tp": 2, "pp_engine": "zb-v"}, shape={**WIDE, "num_hidden_layers": 8},
        tokens=FOUR,
    ),
)  # fmt: skip


def peaks_of(layouts: tuple[Layout, ...]) -> list[int]:
    """On one rank of the world: the peak of each layout's first steps, engine included."""
    with settled():
        return [step_peak(bench_config(**layout.keys)) for layout in layouts]


def step_peak(config: Config) -> int:
    """What the engine holds when it is made, and the most that a step of random tokens makes beyond it."""
    batch = random_batch(config, documents=config.tokens.document_masks)
    engines: list[Engine] = []
    held = lived_in(lambda: engines.append(engine_of(config))).left
    steps = [
        lived_in(lambda: engines[0].train_step(batch, lr=1e-4, weight_decay=0.1, adam_t=step)).peak  # noqa: B023
        for step in range(1, STEPS + 1)
    ]
    return held + max(steps)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One rank's peak and its prediction, in bytes."""

    layout: str
    rank: int
    measured: int
    predicted: RankMemory

    @property
    def ratio(self) -> float:
        """1 where they agree to within the tolerance."""
        apart = abs(self.measured - self.predicted.total) - TOLERANCE_BYTES
        return 1 + max(0, apart) / self.predicted.total


def compare(layouts: tuple[Layout, ...] = LAYOUTS) -> list[Compared]:
    """Every rank of every layout; one launch for each size of world."""
    compared: list[Compared] = []
    for size in sorted({layout.world_size for layout in layouts}):
        chosen = tuple(layout for layout in layouts if layout.world_size == size)
        of_rank = in_world(size, peaks_of, chosen)
        for index, layout in enumerate(chosen):
            config = bench_config(**layout.keys)
            predicted, topology = memory_of_ranks(config, kernels=CPU), topology_of(config)
            compared += [
                Compared(
                    layout=layout.name, rank=rank, measured=of_rank[rank][index],
                    predicted=predicted[topology.coord(rank).pp],
                )
                for rank in range(size)
            ]  # fmt: skip
    return compared


def memory_row() -> Row:
    """The rank whose peak is farthest from its prediction. Its figures are bytes, not times, and repeat exactly.

    Raises ValueError where a peak is too small to say anything.
    """
    compared = compare()
    small = [one for one in compared if one.measured < SMALLEST_PEAK]
    if small:
        raise ValueError(f"peaks below {SMALLEST_PEAK >> 20} MiB: {small}; make these layouts larger")
    worst = max(compared, key=lambda one: one.ratio)
    return Row(
        id="memory-vs-predicted", what="peak live MiB of the rank farthest from its prediction, beyond 4 MiB",
        ours=worst.measured / 2**20, other=worst.predicted.total / 2**20, ratio=worst.ratio, spread=0.0, threads=1,
        shape=f"{worst.layout}, rank {worst.rank}; the worst of {len(LAYOUTS)} layouts, {len(compared)} ranks",
    )  # fmt: skip
