"""Records for tests, as the trainer writes and reads them."""

from typing import Any

from trainer.records import TrainLine

CYCLE: dict[str, Any] = {
    "schema_version": 1,
    "run": "demo",
    "epoch": {"attempt": 1, "generation": 2, "cycle": 3},
    "nonce": "n",
    "resume_from": "step-000000100.a0001g01c0002",
    "skip_windows": [[3, 5]],
    "nodes": [{"node_rank": 0, "name": "node0", "address": "127.0.0.1"}],
    "ranks_per_node": 2,
    "world_size": 2,
    "master_addr": "127.0.0.1",
    "master_port": 29500,
    "config": "run.yaml",
    "beat_interval_s": 5,
    "created_unix": 1.0,
}


def line(**changes: Any) -> TrainLine:
    values: dict[str, Any] = {
        "step": 1,
        "epoch": "a0001g01c0001",
        "consumed_samples": 8,
        "tokens": 1024,
        "loss": 6.9,
        "grad_norm": 1.0,
        "lr": 3e-4,
        "num_valid": 1024,
        "step_time_s": 0.5,
        "data_wait_s": 0.0,
        "tokens_per_s": 2048.0,
        "model_flops": 1e12,
        "mfu": None,
        "mfu_full_attn": None,
        "mfu_megatron": None,
        "hfu": None,
        "skipped": None,
        "save_s": None,
        "unix": 1.0,
    }
    return TrainLine(**{**values, **changes})
