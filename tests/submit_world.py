"""A small config and what the commands are tested with: no process is started, no Slurm is asked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.state.ledger import read_all

Started = list[tuple[Mapping[str, Any], Mapping[str, str]]]
"""Plan and environment of each attempt that the local launcher was asked to start."""

CONFIG = """\
general: {project: p, run: demo, seed: 1}
parallelism: {dp: 2, pp: 2, tp: 1}
model:
  dtype: float32
  model_config:
    {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
     max_position_embeddings: 64, vocab_size: 300, tie_word_embeddings: true}
optimizer: {learning_rate_scheduler: {learning_rate: 1e-3}, weight_decay: 0.01}
tokens: {sequence_length: 32, train_steps: 20, micro_batch_size: 2, batch_accumulation_per_replica: 2}
data: {dataset: {dataset_folder: [DATA]}}
checkpoints: {checkpoint_interval: 5}
slurm:
  nodes: 2
  ranks_per_node: 2
  partition: gpu
  gpu_request: none
  env: {FOO: "a b", HF_TOKEN: hunter2}
recovery: {spares: 1}
"""


def kinds(run_dir: Path) -> list[str]:
    """The kinds of a run's events, in order."""
    return [event.kind for event in read_all(run_dir)]
