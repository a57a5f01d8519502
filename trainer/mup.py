"""Spectral muP: what a matrix's width changes, so that a learning rate found on a narrow model serves a wide one. Pure.

A weight matrix W [out, in] keeps ‖W‖ and ‖ΔW‖ (spectral norms) in proportion to √(out/in) at every width; then the size
of each layer's output, and its change per step, do not depend on the width (arXiv 2310.17813). For Gaussian draws and
Adam, whose updates have entries of size lr, that means:

    hidden matrix, untied head   σ = min(1, √(out/in)) / √in          lr · BASE_FAN_IN / in
    embedding (a row is looked   σ and lr of the config: a lookup
    up, nothing is summed)       sums over no width
    attention                    scores times 1/d instead of 1/√d: queries and keys that learn are correlated
    tied embedding as a head     drawn and updated as the embedding it is, so the logits h·e, a sum over D entries, are
                                 brought back by BASE_FAN_IN / D

The last two are factors of the forward pass that no Llama of Hugging Face has; the checkpoint's manifest records them
and the export folds them into weights.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.model import Config

BASE_FAN_IN = 256
"""The width at which spectral muP and the standard parametrisation have the same learning rates."""


def spectral_std(fan_in: int, fan_out: int) -> float:
    """Standard deviation of a Gaussian matrix whose spectral norm is of order √(out/in)."""
    return min(1.0, math.sqrt(fan_out / fan_in)) / math.sqrt(fan_in)


def lr_multiplier(fan_in: int) -> float:
    """Factor on Adam's learning rate of a matrix."""
    return BASE_FAN_IN / fan_in


def attention_scale(config: "Config") -> float:
    """Factor on q·k: 1/d with muP, else 1/√d."""
    head_dim = config.model.model_config.head_size
    return 1 / head_dim if config.model.init_method.use_mup else standard_attention_scale(head_dim)


def standard_attention_scale(head_dim: int) -> float:
    """1/√d, what every other software applies."""
    return float(head_dim**-0.5)


def output_multiplier(config: "Config") -> float:
    """Factor on the hidden states that enter the head; 1 unless muP meets a tied embedding."""
    model = config.model.model_config
    tied_mup = config.model.init_method.use_mup and model.tie_word_embeddings
    return BASE_FAN_IN / model.hidden_size if tied_mup else 1.0
