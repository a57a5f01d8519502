"""A run small enough for tests: token folders of random ids and a config of a few thousand parameters.

Everything is made from a seed, so two calls make the same run.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainer.data.format import METADATA, Metadata, Shard, docs_file, file_xxh3

VOCAB = 61
SEQUENCE = 16


def write_tokens(folder: Path, *, num_tokens: int, seed: int) -> Path:
    """A token folder of one shard: ids 1 to VOCAB-1, a document end (id 0) every 40 tokens."""
    folder.mkdir(parents=True)
    ids = np.random.default_rng(seed).integers(1, VOCAB, num_tokens, dtype=np.uint16)
    ids[39::40] = 0
    ids[-1] = 0
    file = folder / "shard-00000.bin"
    file.write_bytes(ids.astype("<u2").tobytes())
    ends = (np.flatnonzero(ids == 0) + 1).astype("<u8")
    np.save(folder / docs_file(file.name), ends)
    metadata = Metadata(
        dtype="uint16",
        vocab_size=VOCAB,
        eos_id=0,
        num_tokens=num_tokens,
        num_documents=len(ends),
        tokenizer={"path": "none", "sha256": None},
        shards=(
            Shard(file=file.name, tokens=num_tokens, documents=len(ends), xxh3=file_xxh3(file), max_id=int(ids.max())),
        ),
        source={"made": "by a test"},
    )
    (folder / METADATA).write_text(json.dumps(metadata.to_json()))
    return folder


def config(
    data: Path, *, dp: int = 1, pp: int = 1, tp: int = 1, train_steps: int = 6, interval: int = 3,
    val_check_interval: int | None = None, **tokens: int
) -> dict[str, Any]:  # fmt: skip
    """The config of a two-layer Llama in fp32, with a validation set and a cosine that bends within the run."""
    return {
        "general": {"project": "tests", "run": "tiny", "seed": 7},
        "parallelism": {"dp": dp, "pp": pp, "tp": tp, "pp_engine": "1f1b"},
        "model": {
            "model_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": VOCAB,
                "max_position_embeddings": SEQUENCE,
                "tie_word_embeddings": True,
            },
            "dtype": "float32",
        },
        "optimizer": {
            "learning_rate_scheduler": {
                "learning_rate": 0.01,
                "lr_warmup_steps": 2,
                "lr_decay_style": "cosine",
                "min_decay_lr": 0.001,
            },
            "weight_decay": 0.1,
            "clip_grad": 1.0,
        },
        "tokens": {
            "sequence_length": SEQUENCE,
            "train_steps": train_steps,
            "micro_batch_size": tokens.get("micro_batch_size", 2),
            "batch_accumulation_per_replica": tokens.get("accumulation", 2),
            "val_check_interval": val_check_interval,
        },
        "data": {
            "dataset": {"dataset_folder": [str(data / "a"), str(data / "b")], "dataset_weights": [0.75, 0.25]},
            "validation": {"dataset_folder": [str(data / "held-out")], "num_samples": 5},
        },
        "checkpoints": {"checkpoint_interval": interval},
        "logging": {"iteration_step_info_interval": 1},
    }


def make(root: Path, name: str = "tiny", **changes: Any) -> Path:
    """Token folders (once) and the config `name`.yaml under `root`; returns the config's path."""
    data = root / "data"
    if not data.exists():
        for seed, (folder, num_tokens) in enumerate({"a": 4000, "b": 2500, "held-out": 400}.items()):
            write_tokens(data / folder, num_tokens=num_tokens, seed=seed)
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config(data, **changes)))
    return path
