"""One equivalence case: a tiny Llama with nasty sizes, trained by our engine on a mesh. Runs on the pool's ranks.

Prime vocabulary (padding under tp), grouped kv heads, random ignored labels, clipping that bites, a warming-up rate.
"""

from dataclasses import dataclass

import numpy as np
import torch
from dist.pool import Ranks
from reference import document_positions

from trainer.config.model import (
    Config,
    Data,
    Dataset,
    General,
    InitMethod,
    LearningRateScheduler,
    Model,
    ModelConfig,
    Optimizer,
    Parallelism,
    ParameterGroup,
    Tokens,
)
from trainer.data.batch import StepBatch
from trainer.engine import Engine, StepResult
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology

V, T, GLOBAL_BATCH = 67, 16, 8
STEPS, CLIP, DECAY = 5, 0.5, 0.1
LR = [2e-3, 4e-3, 6e-3, 5e-3, 4e-3]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A point of the test matrix. `groups`: (pattern, factor on weight decay, factor on the rate), first match wins."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    tied: bool = True
    zero_stage: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    layers_per_stage: tuple[int, ...] | None = None
    dtype: str = "float64"
    bucket_numel: int = 4096
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    use_mup: bool = False
    sequence_parallel: bool = False
    model_type: str = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    groups: tuple[tuple[str, float, float], ...] = ()
    recompute: str = "none"
    recompute_interval: int = 1
    document_masks: bool = False

    @property
    def micro_batches(self) -> int:
        """m per dp rank: 4, or what the global batch leaves."""
        return min(4, GLOBAL_BATCH // self.dp)

    @property
    def topology(self) -> Topology:
        return Topology(dp=self.dp, pp=self.pp, tp=self.tp)

    def __str__(self) -> str:
        tie = "tied" if self.tied else "untied"
        virtual = "" if self.virtual_stages is None else f"-v{self.virtual_stages}"
        extra = virtual + ("" if self.dtype == "float64" else f"-{self.dtype}") + "-mup" * self.use_mup
        extra += "-attention-bias" * self.attention_bias + "-mlp-bias" * self.mlp_bias
        extra += "-zloss" * bool(self.z_loss) + "-smooth" * bool(self.label_smoothing)
        extra += f"-{self.model_type}" * (self.model_type != "llama")
        extra += "-sp" * self.sequence_parallel + "-groups" * bool(self.groups)
        extra += "-documents" * self.document_masks
        if self.recompute != "none":
            extra += f"-recompute-{self.recompute}{self.recompute_interval}"
        return f"dp{self.dp}-pp{self.pp}-tp{self.tp}-{tie}-zero{self.zero_stage}-{self.schedule}{extra}"


def make_config(case: Case) -> Config:
    shape = ModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=case.layers, num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads, vocab_size=V, tie_word_embeddings=case.tied, rms_norm_eps=1e-5,
        model_type=case.model_type, attention_bias=case.attention_bias, mlp_bias=case.mlp_bias,  # type: ignore[arg-type]
    )  # fmt: skip
    return Config(
        general=General(project="test", run="equivalence", seed=7),
        parallelism=Parallelism(
            dp=case.dp, pp=case.pp, tp=case.tp, pp_engine=case.schedule, virtual_stages=case.virtual_stages,
            layers_per_stage=None if case.layers_per_stage is None else list(case.layers_per_stage),
            tp_mode="REDUCE_SCATTER" if case.sequence_parallel else "ALL_REDUCE",
        ),
        model=Model(
            model_config=shape, dtype=case.dtype, init_method=InitMethod(std=0.08, use_mup=case.use_mup),  # type: ignore[arg-type]
            recompute=case.recompute, recompute_interval=case.recompute_interval,  # type: ignore[arg-type]
        ),
        optimizer=Optimizer(
            learning_rate_scheduler=LearningRateScheduler(learning_rate=LR[0]), weight_decay=DECAY, clip_grad=CLIP,
            zero_stage=case.zero_stage, z_loss_coefficient=case.z_loss, label_smoothing=case.label_smoothing,
            groups=[ParameterGroup(match=match, weight_decay_mult=wd, lr_mult=lr) for match, wd, lr in case.groups],
        ),
        tokens=Tokens(
            sequence_length=T, train_steps=STEPS, micro_batch_size=GLOBAL_BATCH // (case.micro_batches * case.dp),
            batch_accumulation_per_replica=case.micro_batches, document_masks=case.document_masks,
        ),
        data=Data(dataset=Dataset(dataset_folder=["unused"])),
    )  # fmt: skip


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels) [GLOBAL_BATCH, T] of a step; 30 % of the labels ignored, sample 3 altogether."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, V, (GLOBAL_BATCH, T + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[3] = -100
    return tokens[:, :-1].contiguous(), labels


def local_batch(case: Case, step: int, dp_rank: int) -> StepBatch:
    """The dp rank's contiguous share of the global batch, as micro-batches."""
    share = GLOBAL_BATCH // case.dp
    rows = slice(dp_rank * share, (dp_rank + 1) * share)
    ids, labels = (x[rows].unflatten(0, (case.micro_batches, -1)) for x in global_batch(step))
    positions = document_positions(ids) if case.document_masks else torch.arange(T).expand(ids.shape)
    return StepBatch(
        input_ids_MBT=ids, labels_MBT=labels, position_ids_MBT=positions, sample_ids=tuple(range(rows.start, rows.stop))
    )


def make_engine(ranks: Ranks, case: Case) -> Engine:
    context = ParallelContext(case.topology, rank=ranks.rank, device=torch.device("cpu"), group_factory=ranks.group)
    engine = Engine(make_config(case), context, bucket_numel=case.bucket_numel)
    engine.init_weights()
    return engine


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank saw. `gradients`: name → (first element in the local tensor, values) pieces of its dp shard."""

    steps: list[StepResult]
    gradients: list[tuple[str, int, np.ndarray]]
    weights: dict[str, np.ndarray]
    validation: tuple[float, int]


def run_case(ranks: Ranks, case: Case) -> RankRun:
    """Step-1 gradients, STEPS updates, then weights and the loss of a further batch."""
    engine = make_engine(ranks, case)
    dp_rank = engine.ctx.get_dp_rank()
    first = local_batch(case, 0, dp_rank)
    engine.backward(first, num_valid=int((global_batch(0)[1] != -100).sum()))
    engine.optimizer.reduce_gradients()
    gradients = gradient_pieces(engine)
    steps = [
        engine.train_step(local_batch(case, i, dp_rank), lr=LR[i], weight_decay=DECAY, adam_t=i + 1)
        for i in range(STEPS)
    ]
    return RankRun(
        steps=steps, gradients=gradients, weights=live_weights(engine),
        validation=engine.eval_loss(local_batch(case, STEPS, dp_rank)),
    )  # fmt: skip


def gradient_pieces(engine: Engine) -> list[tuple[str, int, np.ndarray]]:
    pieces = []
    for storage in engine.optimizer.storages:
        for slot in storage.bucket.slots:
            start, stop = max(slot.start, storage.shard.start), min(slot.stop, storage.shard.stop)
            if start < stop:
                pieces.append((slot.name, start - slot.start, storage.grads[start:stop].double().numpy().copy()))
    return pieces


def live_weights(engine: Engine) -> dict[str, np.ndarray]:
    names = [slot.name for bucket in engine.layout.buckets for slot in bucket.slots]
    return {name: engine.optimizer.view(name)[0].double().numpy().copy() for name in names}
