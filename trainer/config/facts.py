"""Launch facts: what an orchestrator must know of a training before it asks for machines. Pure.

They follow from the config alone (no file is opened, no device asked), are printed by `check --json` and frozen beside
the run's config; `configs/schema/launch_facts.schema.json` describes them.
"""

import hashlib
import json
from typing import Any

from pydantic import TypeAdapter

from trainer.activations import ACCELERATOR, DTYPE_BYTES, Kernels
from trainer.flops import step_flops
from trainer.memory import rank_memory, topology_of
from trainer.pipeline.schedule import Schedule
from trainer.schedules import (
    batch_size_at,
    decay_start,
    decay_steps,
    first_steps,
    lr_at,
    samples_before,
    weight_decay_at,
    weight_decay_steps,
)
from trainer.spec import param_specs

from .model import Config

SCHEMA_VERSION = 1
NUM_STATES = 3  # master weights and two moments


def launch_facts(config: Config, *, schedule: Schedule | None = None, kernels: Kernels = ACCELERATOR) -> dict[str, Any]:
    """The record, as plain data. `schedule`, `kernels`: what the memory is estimated for, as `rank_memory`."""
    mesh, tokens, flops = config.parallelism, config.tokens, step_flops(config)
    num_params = sum(spec.numel for spec in param_specs(config, topology_of(config)))
    state_bytes = max(4, DTYPE_BYTES[config.compute_dtype])
    return {
        "schema_version": SCHEMA_VERSION,
        "run": config.general.run,
        "project": config.general.project,
        "world_size": config.world_size,
        "dp": mesh.dp,
        "pp": mesh.pp,
        "tp": mesh.tp,
        "cp": mesh.cp,
        "tokens_per_step": config.tokens_per_step,
        "samples_per_step": config.global_batch_size,
        "sequence_length": tokens.sequence_length,
        "train_steps": tokens.train_steps,
        "train_samples": config.train_samples,
        "checkpoint_interval": config.checkpoints.checkpoint_interval,
        "checkpoint_bytes": num_params * NUM_STATES * state_bytes,
        "num_params": num_params,
        "flops_per_step": flops.exact,
        "flops_per_step_full_attn": flops.full_attn,
        "flops_per_step_megatron": flops.megatron,
        "memory_per_rank_bytes": rank_memory(config, schedule=schedule, kernels=kernels).as_dict(),
        "compute_dtype": config.compute_dtype,
        "config_digest": config_digest(config),
        "vocab_size": config.model.model_config.vocab_size,
        "tokenizer": config.tokenizer.tokenizer_name_or_path if config.tokenizer else None,
    }


def curve(config: Config) -> list[dict[str, Any]]:
    """Learning rate, weight decay and batch size (samples) at the steps where one of them changes its course."""
    optimizer, train_steps = config.optimizer, config.tokens.train_steps
    rate, decay, sizes = optimizer.learning_rate_scheduler, optimizer.weight_decay_schedule, config.batch_sizes
    start, length = decay_start(rate), decay_steps(rate, train_steps=train_steps)
    steps = {1, rate.lr_warmup_steps, start, start + length // 2, start + length, train_steps, *first_steps(sizes)}
    if decay is not None:
        changing = weight_decay_steps(decay, train_steps=train_steps)
        steps |= {decay.starting_step, decay.starting_step + changing}
    return [
        {
            "step": step,
            "lr": lr_at(step, rate, train_steps=train_steps),
            "weight_decay": weight_decay_at(step, optimizer.weight_decay, decay, train_steps=train_steps),
            "batch_size": batch_size_at(samples_before(step, sizes), sizes),
        }
        for step in sorted(steps)
        if 1 <= step <= train_steps
    ]


def as_data(config: Config) -> dict[str, Any]:
    """The config with all defaults, as plain data."""
    data: dict[str, Any] = TypeAdapter(Config).dump_python(config, mode="json")
    return data


def config_digest(config: Config) -> str:
    """SHA-256 over the typed values: two files that mean the same training have one digest."""
    text = json.dumps(as_data(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
