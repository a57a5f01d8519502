"""Small Hugging Face folders as transformers itself writes them, and what its models say of a few tokens."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import disable_progress_bar

disable_progress_bar()

VOCAB, LENGTH = 67, 24

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 12},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama with llama3 rope": {"rope_parameters": LLAMA3},
    "llama with yarn rope": {"rope_parameters": YARN},
    "mistral": {"sliding_window": None, "head_dim": 12},
    "qwen2": {},
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "smollm3": {"num_hidden_layers": 4},
    "starcoder2": {"initializer_range": 0.1},
}
"""Families (the first word), with what tells their configs apart; some tied, some not."""


def make_model(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly drawn model; norms and biases are not 1 and 0, or a tensor in the wrong place would not be seen."""
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": None, "initializer_range": 0.1,
    }  # fmt: skip
    config = CONFIG_MAPPING[kind.split()[0]](**{**shape, **KINDS[kind], **changes})
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) / 5)
    return model.to(dtype).eval()


def make_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """The model of `make_model` as `save_pretrained` writes it."""
    shard = changes.pop("max_shard_size", "1GB")
    make_model(kind, **changes).save_pretrained(folder, max_shard_size=shard)
    return folder


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json; None with a leading underscore in front of the name takes the key away."""
    path = folder / "config.json"
    record = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            record.pop(key, None)
        else:
            record[key] = value
    path.write_text(json.dumps(record))
    return folder


def some_ids(num: int = 2) -> torch.Tensor:
    return torch.arange(num * LENGTH).reshape(num, LENGTH) * 7 % VOCAB


def logits_of_hf(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=some_ids()).logits
