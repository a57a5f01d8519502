"""Functions run on the pool's ranks by test_steps.py: whole engines, one thing made special on one rank."""

import hashlib

import torch
from dist.pool import Ranks
from engine_world import tiny_batch, tiny_config

from trainer.engine import Engine, StepResult
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology
from trainer.peers import agree

CPU = torch.device("cpu")


def engine_on(ranks: Ranks, topology: Topology, **options: object) -> Engine:
    ctx = ParallelContext(topology, rank=ranks.rank, device=CPU, group_factory=ranks.group)
    config = tiny_config(dp=topology.dp, pp=topology.pp, tp=topology.tp, **options)  # type: ignore[arg-type]
    engine = Engine(config, ctx, bucket_numel=4096)
    engine.init_weights()
    return engine


def digest(engine: Engine) -> dict[str, str]:
    """Canonical name → digest of the live local weight."""
    names = [slot.name for bucket in engine.layout.buckets for slot in bucket.slots]
    return {n: hashlib.sha256(engine.optimizer.view(n)[0].float().numpy().tobytes()).hexdigest() for n in names}


def nan_on_one_rank(
    ranks: Ranks, topology: Topology, bad: int, options: dict[str, object]
) -> tuple[StepResult, bool, StepResult]:
    """A weight of rank `bad` is NaN for one step. (result, whether nothing moved, result of the next step)."""
    engine = engine_on(ranks, topology, **options)
    batch = tiny_batch(engine.ctx.get_dp_rank())
    weight = engine.optimizer.storages[0].weights
    good = weight[0].clone()
    before = [t.clone() for t in engine.state_shards().values()]
    if ranks.rank == bad:
        weight[0] = float("nan")
    result = engine.train_step(batch, lr=1e-3, weight_decay=0.1, adam_t=1)
    if ranks.rank == bad:
        weight[0] = good
    unmoved = all(torch.equal(a, b) for a, b in zip(before, engine.state_shards().values(), strict=True))
    return result, unmoved, engine.train_step(batch, lr=1e-3, weight_decay=0.1, adam_t=1)


def votes(ranks: Ranks, topology: Topology, words: tuple[int, ...]) -> list[int]:
    """Each rank brings its word; the agreed word of a real step, then of a step without a valid label."""
    engine = engine_on(ranks, topology)
    batch = tiny_batch(engine.ctx.get_dp_rank())
    real = engine.train_step(batch, lr=1e-3, weight_decay=0, adam_t=1, control_word=words[ranks.rank])
    batch.labels_MBT.fill_(-100)
    empty = engine.train_step(batch, lr=1e-3, weight_decay=0, adam_t=2, control_word=words[ranks.rank])
    assert empty.num_valid == 0 and empty.skipped is not None
    return [real.control_word, empty.control_word]


def told(ranks: Ranks, topology: Topology, error: type[Exception] | None) -> object:
    """What `agree` says where every rank sees another name, or what each rank raises where rank 0 cannot look."""
    ctx = ParallelContext(topology, rank=ranks.rank, device=CPU, group_factory=ranks.group)

    def look() -> dict[str, object]:
        if error is not None:
            raise error("the folder does not answer")
        return {"name": f"seen by {ranks.rank}", "done": None}

    try:
        return agree(ctx, look)
    except Exception as raised:
        return type(raised).__name__, str(raised)


def counted_ahead(ranks: Ranks, topology: Topology, ahead: bool) -> tuple[list[StepResult], list[int], dict[str, str]]:
    """Five steps, the third without a label: results, communication calls of each, weight digests.

    ahead: each step is told what the step before has counted, as the loop does; else each counts for itself.
    """
    engine = engine_on(ranks, topology)
    batches = [tiny_batch(10 * t + engine.ctx.get_dp_rank()) for t in range(5)]
    batches[2].labels_MBT.fill_(-100)
    results: list[StepResult] = []
    calls: list[int] = []
    for t, batch in enumerate(batches):
        before = engine.collective_seq
        results.append(
            engine.train_step(
                batch,
                lr=1e-3,
                weight_decay=0.1,
                adam_t=t + 1,
                num_valid=results[-1].next_num_valid if ahead and results else None,
                next_valid=batches[t + 1].num_valid if t < 4 else 0,
            )
        )
        calls.append(engine.collective_seq - before)
    return results, calls, digest(engine)


def fp32_bits(
    ranks: Ranks, topology: Topology, steps: int, options: dict[str, object]
) -> tuple[list[float], dict[str, str]]:
    """Losses and weight digests after `steps` fp32 steps."""
    engine = engine_on(ranks, topology, **options)
    losses = [
        engine.train_step(tiny_batch(10 * t + engine.ctx.get_dp_rank()), lr=1e-3, weight_decay=0.1, adam_t=t).loss
        for t in range(1, steps + 1)
    ]
    return losses, digest(engine)
