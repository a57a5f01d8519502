"""Validation on every kind of mesh: the same weights give the same loss, and training does not notice. Case R5."""

import pytest
from dist.pool import Pool, Ranks
from dist.step_cases import digest, engine_on
from engine_world import tiny_batch

from trainer.mesh.topology import Topology

MESHES = [Topology(), Topology(dp=2, pp=2, tp=2), Topology(pp=4)]

Losses = list[tuple[float, int]]


def steps_with_validation(
    ranks: Ranks, topology: Topology, options: dict[str, object], *, measured: bool
) -> tuple[list[tuple[float, float]], Losses, dict[str, str]]:
    """(loss, gradient norm) of 3 steps, held-out losses in between where `measured`, digests of the weights."""
    engine = engine_on(ranks, topology, **options)
    steps, losses = [], []
    for t in range(1, 4):
        if measured:
            losses += [engine.eval_loss(tiny_batch(90 + engine.ctx.get_dp_rank(), m=m)) for m in (3, 1, 3)]
        result = engine.train_step(tiny_batch(10 * t + engine.ctx.get_dp_rank()), lr=1e-2, weight_decay=0.1, adam_t=t)
        steps.append((result.loss, result.grad_norm))
    return steps, losses, digest(engine)


def measuring(ranks: Ranks, *args: object) -> object:
    return steps_with_validation(ranks, *args, measured=True)  # type: ignore[arg-type]


def training_only(ranks: Ranks, *args: object) -> object:
    return steps_with_validation(ranks, *args, measured=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_validation_repeats_to_the_bit_and_training_goes_on_as_without(
    pool: Pool, topology: Topology, schedule: str
) -> None:
    options: dict[str, object] = {"layers": 4, "pp_engine": schedule}
    plain = pool.run(topology, training_only, topology, options)
    others = pool.run(topology, measuring, topology, options)
    for (steps, _, weights), (other_steps, losses, other_weights) in zip(plain, others, strict=True):
        assert (other_steps, other_weights) == (steps, weights)
        assert losses == others[0][1], "equal on all ranks"
        assert all(losses[at] == losses[at + 2] for at in range(0, 9, 3))
        assert len({losses[at] for at in range(0, 9, 3)}) == 3, "every step moved the weights"
