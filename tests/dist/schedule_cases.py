"""Functions run on the pool's ranks by test_schedules.py: fp32 engines under every schedule."""

from dist.pool import Ranks
from dist.step_cases import digest, engine_on
from engine_world import tiny_batch

from trainer.mesh.topology import Topology


def schedule_bits(
    ranks: Ranks, topology: Topology, m: int, options: dict[str, object]
) -> tuple[list[tuple[float, float]], tuple[float, int], dict[str, str]]:
    """((loss, gradient norm) of 3 fp32 steps of m micro-batches, a held-out loss, weight digests)."""
    engine = engine_on(ranks, topology, **options)
    steps = []
    for t in range(1, 4):
        batch = tiny_batch(10 * t + engine.ctx.get_dp_rank(), m=m)
        result = engine.train_step(batch, lr=1e-3, weight_decay=0.1, adam_t=t)
        steps.append((result.loss, result.grad_norm))
    return steps, engine.eval_loss(tiny_batch(99, m=3)), digest(engine)
