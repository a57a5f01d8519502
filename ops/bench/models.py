"""Configs, batches and engines that the rows share. Weights are drawn at σ = 0.02: with N(0, 1) weights the matrix
products run into denormals and measure something else."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.model import Config
    from trainer.data.batch import StepBatch
    from trainer.engine import Engine


def bench_config(
    *, mesh: dict[str, Any] | None = None, shape: dict[str, Any] | None = None, tokens: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None,
) -> "Config":  # fmt: skip
    """A config from the keys of its sections; what is left out is a small model on one rank in float32."""
    from trainer.config import model as c
    from trainer.config.architecture import ModelConfig

    base = {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8192, "tie_word_embeddings": False,
    }  # fmt: skip
    counts = {"sequence_length": 256, "train_steps": 1, "micro_batch_size": 4, "batch_accumulation_per_replica": 2}
    return c.Config(
        general=c.General(project="bench", run="bench"),
        parallelism=c.Parallelism(**({"dp": 1, "pp": 1, "tp": 1} | (mesh or {}))),
        model=c.Model(model_config=ModelConfig(**(base | (shape or {}))), **({"dtype": "float32"} | (model or {}))),
        optimizer=c.Optimizer(learning_rate_scheduler=c.LearningRateScheduler(learning_rate=1e-4), **(optimizer or {})),
        tokens=c.Tokens(**(counts | (tokens or {}))),
        data=c.Data(dataset=c.Dataset(dataset_folder=["unused"])),
    )


def random_batch(config: "Config", *, documents: bool = False) -> "StepBatch":
    """Random tokens for one dp rank; `documents`: two in each sample, cut in the middle."""
    import torch

    from trainer.data.batch import StepBatch

    tokens = config.tokens
    shape = (tokens.batch_accumulation_per_replica, tokens.micro_batch_size, tokens.sequence_length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.model.model_config.vocab_size, shape, generator=generator)
    length = tokens.sequence_length // 2 if documents else tokens.sequence_length
    positions = (torch.arange(tokens.sequence_length) % length).expand(shape)
    samples = tuple(range(shape[0] * shape[1]))
    return StepBatch(input_ids_MBT=ids, labels_MBT=ids.roll(-1, -1), position_ids_MBT=positions, sample_ids=samples)


def engine_of(config: "Config", *, bucket_numel: int | None = None) -> "Engine":
    """An engine on this rank of the world that was joined, weights drawn. Comm: makes the mesh's groups."""
    import torch

    from trainer.engine import Engine
    from trainer.memory import topology_of
    from trainer.mesh.context import ParallelContext
    from trainer.optim.layout import DEFAULT_BUCKET_NUMEL

    context = ParallelContext(topology_of(config), device=torch.device("cpu"))
    engine = Engine(config, context, bucket_numel=bucket_numel or DEFAULT_BUCKET_NUMEL)
    engine.init_weights()
    return engine
