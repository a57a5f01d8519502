"""One case of the oracle, trained by our engine on its mesh. Runs on the pool's ranks.

Random ignored labels, a whole sample and a whole micro-batch of them, a rate that warms up, clipping that bites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dist.axes import DECAY, SEQUENCE, Case, config_of
from dist.pool import Ranks
from reference import document_positions

from trainer.config.model import Config
from trainer.data.batch import StepBatch
from trainer.digests import check_replicas
from trainer.engine import Engine, StepResult
from trainer.mesh.context import ParallelContext
from trainer.optim.storage import BucketStorage
from trainer.replicas import Scope

QUICK_STEPS, FULL_STEPS = 3, 10
IGNORED_SAMPLES = [2, 3, 5]


def lr_at(step: int, config: Config) -> float:
    """Learning rate of update `step`, from 0: three steps of warm-up, then a decay.

    A quarter of it under spectral muP, which multiplies it by up to 16 for matrices this narrow: at the whole rate the
    reference run itself differs from itself, its samples in another order, by 5e-11 after ten steps; so by 1e-12.
    """
    rate = 6e-3 / (4 if config.model.init_method.use_mup else 1)
    return rate * min(step + 1, 3) / 3 * 0.9 ** max(0, step - 2)


def global_batch(samples: int, vocab_size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels) [samples, SEQUENCE] of a step; 30 % of the labels ignored, three samples altogether.

    Samples 2 and 3 are a whole micro-batch where micro-batches have one or two samples.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab_size, (samples, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[[i for i in IGNORED_SAMPLES if i < samples]] = -100
    return tokens[:, :-1].contiguous(), labels


def batch_of(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a case."""
    config = config_of(case)
    return global_batch(config.global_batch_size, config.model.model_config.vocab_size, step)


def local_batch(case: Case, step: int, dp_rank: int) -> StepBatch:
    """The dp rank's contiguous share of the global batch, as micro-batches."""
    config = config_of(case)
    share = config.global_batch_size // case.dp
    rows = slice(dp_rank * share, (dp_rank + 1) * share)
    ids, labels = (x[rows].unflatten(0, (config.num_micro_batches, -1)) for x in batch_of(case, step))
    positions = document_positions(ids) if config.tokens.document_masks else torch.arange(SEQUENCE).expand(ids.shape)
    return StepBatch(
        input_ids_MBT=ids, labels_MBT=labels, position_ids_MBT=positions, sample_ids=tuple(range(rows.start, rows.stop))
    )


def make_engine(ranks: Ranks, case: Case) -> Engine:
    context = ParallelContext(case.topology, rank=ranks.rank, device=torch.device("cpu"), group_factory=ranks.group)
    engine = Engine(config_of(case), context, bucket_numel=case["bucket"])
    engine.init_weights()
    return engine


def train(engine: Engine, case: Case, steps: Sequence[int]) -> list[StepResult]:
    """The updates of `steps`, counted from 0; labels are counted a step ahead, as the loop does."""
    dp_rank = engine.ctx.get_dp_rank()
    batches = [local_batch(case, step, dp_rank) for step in steps]
    results: list[StepResult] = []
    for index, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        following = batches[index + 1].num_valid if index + 1 < len(batches) else 0
        known = results[-1].next_num_valid if results else None
        results.append(
            engine.train_step(
                batch,
                lr=lr_at(step, config_of(case)),
                weight_decay=DECAY,
                adam_t=step + 1,
                num_valid=known,
                next_valid=following,
                grad_norms=not results,
            )
        )
    return results


Pieces = list[tuple[str, int, np.ndarray]]
"""(name, first element in the flat local tensor, values): what a dp shard holds of each tensor."""


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank saw. `weights`: the live local tensors, `masters` what the optimizer holds of them."""

    steps: list[StepResult]
    gradients: Pieces
    masters: Pieces
    weights: dict[str, np.ndarray]
    validation: tuple[float, int]


def run_case(ranks: Ranks, case: Case, steps: int) -> RankRun:
    """Gradients of the first batch, `steps` updates, then weights and the loss of one more batch."""
    engine = make_engine(ranks, case)
    dp_rank = engine.ctx.get_dp_rank()
    engine.backward(local_batch(case, 0, dp_rank), num_valid=int((batch_of(case, 0)[1] != -100).sum()))
    engine.optimizer.reduce_gradients()
    gradients = [piece for s in engine.optimizer.storages for piece in pieces(s, s.grads, 0)]
    results = train(engine, case, range(steps))
    weights = live_weights(engine)
    check_replicas(engine, step=steps, scope=Scope.ALL)  # raises where a layout lets copies drift
    return RankRun(
        steps=results, gradients=gradients, weights=weights,
        masters=[piece for s in engine.optimizer.storages for piece in pieces(s, s.master, s.held.start)],
        validation=engine.eval_loss(local_batch(case, steps, dp_rank)),
    )  # fmt: skip


def pieces(storage: BucketStorage, flat: torch.Tensor, first: int) -> Pieces:
    """This dp rank's part of each tensor of a bucket; flat[0] is element `first` of the bucket."""
    found = []
    for slot in storage.bucket.slots:
        start, stop = max(slot.start, storage.shard.start), min(slot.stop, storage.shard.stop)
        if start < stop:
            found.append((slot.name, start - slot.start, flat[start - first : stop - first].double().numpy().copy()))
    return found


def live_weights(engine: Engine) -> dict[str, np.ndarray]:
    """Name → live local tensor, once all of it is gathered."""
    engine.optimizer.wait_weights()
    names = [slot.name for bucket in engine.layout.buckets for slot in bucket.slots]
    return {name: engine.optimizer.view(name)[0].double().numpy().copy() for name in names}
