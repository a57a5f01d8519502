"""A tiny config and one-rank engines for tests of the trainer's engine."""

from typing import Any

import torch

from trainer.config import model as c
from trainer.config.architecture import ModelConfig
from trainer.data.batch import StepBatch
from trainer.engine import Engine
from trainer.mesh.context import ParallelContext
from trainer.mesh.topology import Topology

V, T = 67, 16


def tiny_config(
    *, dp: int = 1, pp: int = 1, tp: int = 1, tied: bool = True, layers: int = 2, heads: int = 4, kv_heads: int = 2,
    dtype: str = "float32", zero_stage: int = 1, use_mup: bool = False, vocab: int = V, clip: float | None = 1.0,
    recompute: str = "none", recompute_interval: int = 1, document_masks: bool = False,
    pp_engine: str = "1f1b", virtual_stages: int | None = None, layers_per_stage: list[int] | None = None,
    tp_mode: str = "ALL_REDUCE", groups: tuple[c.ParameterGroup, ...] = (), **shape_keys: Any,
) -> c.Config:  # fmt: skip
    """`shape_keys`: further keys of the architecture."""
    shape = ModelConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, **shape_keys,
    )  # fmt: skip
    return c.Config(
        general=c.General(project="test", run="tiny", seed=7),
        parallelism=c.Parallelism(
            dp=dp,
            pp=pp,
            tp=tp,
            pp_engine=pp_engine,
            virtual_stages=virtual_stages,
            layers_per_stage=layers_per_stage,
            tp_mode=tp_mode,  # type: ignore[arg-type]
        ),
        model=c.Model(
            model_config=shape,
            dtype=dtype,
            init_method=c.InitMethod(use_mup=use_mup),
            recompute=recompute,  # type: ignore[arg-type]
            recompute_interval=recompute_interval,
        ),
        optimizer=c.Optimizer(
            learning_rate_scheduler=c.LearningRateScheduler(learning_rate=1e-3),
            zero_stage=zero_stage,
            clip_grad=clip,
            groups=list(groups),
        ),
        tokens=c.Tokens(
            sequence_length=T,
            train_steps=9,
            micro_batch_size=2,
            batch_accumulation_per_replica=2,
            document_masks=document_masks,
        ),
        data=c.Data(dataset=c.Dataset(dataset_folder=["unused"])),
    )


def solo_engine(config: c.Config) -> Engine:
    """An engine in this process, weights drawn."""
    engine = Engine(config, ParallelContext(Topology(), device=torch.device("cpu")), bucket_numel=4096)
    engine.init_weights()
    return engine


def tiny_batch(seed: int = 0, *, m: int = 2, b: int = 2) -> StepBatch:
    """Random tokens with 30 % of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (m, b, T + 1), generator=generator)
    labels = tokens[..., 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return StepBatch(
        input_ids_MBT=tokens[..., :-1].contiguous(), labels_MBT=labels,
        position_ids_MBT=torch.arange(T).expand(labels.shape), sample_ids=tuple(range(m * b)),
    )  # fmt: skip


def logits_of(engine: Engine, batch: StepBatch) -> torch.Tensor:
    """The logits [M, B, T, V] of a one-rank engine, from what enters its head: the engine itself never makes them."""
    head = engine._modules["lm_head"]
    seen: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["hidden"]), with_kwargs=True)
    engine.eval_loss(batch)
    hook.remove()
    return torch.stack(seen).detach() @ head.weight.detach().T
