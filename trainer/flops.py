"""Model FLOPs of one optimizer step, and the peak of the GPUs they are divided by. Pure.

    F = 3 · [ tokens · 2 · (weights multiplied per token) + 4 · H · d · L · pairs ]      forward + backward = 3 forwards

Only useful work counts: recomputation, padding of the vocabulary, the embedding lookup, norms and softmax are free.
`hardware` is `exact` and what `model.recompute` computes again; its share of the peak is HFU.
What differs between codes is `pairs`, the (query, key) pairs of attention, and the vocabulary; so three are given:

    exact      pairs a causal model needs, T(T+1)/2 per sample; the true vocabulary
    full_attn  T² per sample: comparable with nanotron and torchtitan
    megatron   T²/2 per sample, vocabulary padded to a multiple of tp: comparable with Megatron-LM

Dims: D hidden · F ffn · H heads · K kv heads · d head dim · L layers · T sequence · V vocab.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import Config

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one optimizer step over the global batch, by the conventions of the module docstring.

    `pairs` are those of whole samples. Document masks leave fewer, which only the batch knows: each that is missing
    takes `exact_per_pair` off `exact` and `hardware_per_pair` off `hardware`. The other conventions know no documents.
    """

    exact: float
    full_attn: float
    megatron: float
    hardware: float
    pairs: int
    exact_per_pair: float
    hardware_per_pair: float


def step_flops(config: "Config", *, num_samples: int | None = None) -> StepFlops:
    """FLOPs of one step on `num_samples` (missing: the full batch).

    Independent of dp, pp and tp except for Megatron's padded vocabulary.
    """
    model, tp = config.model.model_config, config.parallelism.tp
    samples = config.global_batch_size if num_samples is None else num_samples
    length = config.tokens.sequence_length
    tokens = samples * length
    matmul = 2 * tokens * model.num_hidden_layers * layer_weights(config)
    head, padded_head = (
        2 * tokens * model.hidden_size * v for v in (model.vocab_size, -(-model.vocab_size // tp) * tp)
    )
    per_pair = 4 * model.num_attention_heads * model.head_dim * model.num_hidden_layers  # QKᵀ and AV
    pairs = samples * (length * (length + 1) // 2)
    attention = per_pair * pairs
    modes = [config.model.recompute_of(layer) for layer in range(model.num_hidden_layers)]
    share = (len(modes) - modes.count("none")) / len(modes)
    again = matmul * modes.count("full") / len(modes) + attention * share
    return StepFlops(
        exact=3.0 * (matmul + head + attention),
        hardware=3.0 * (matmul + head + attention) + again,
        full_attn=3.0 * (matmul + head + per_pair * samples * length * length),
        megatron=3.0 * (matmul + padded_head + per_pair * samples * length * length // 2),
        pairs=pairs,
        exact_per_pair=3.0 * per_pair,
        hardware_per_pair=(3.0 + share) * per_pair,
    )


def layer_weights(config: "Config") -> int:
    """Weights one token meets in one decoder layer: q, o (H·d·D each), k, v (K·d·D each), D·F in each of the
    feed-forward's two or three matrices."""
    model = config.model.model_config
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    return attention + model.ffn_matrices * model.hidden_size * model.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU type: `pattern` finds it in a device or Slurm type name; dense peaks in FLOP/s by compute dtype."""

    name: str
    pattern: str
    memory_bytes: int
    peak: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def _gpu(name: str, pattern: str, memory: float, bf16: float | None, fp32: float | None, fp64: float | None) -> Gpu:
    """Memory in GB (10⁹), peaks in TFLOP/s; None: the vendor gives no number, or the format is missing."""
    given = {"bfloat16": bf16, "float32": fp32, "float64": fp64}
    peak = {dtype: value * 1e12 for dtype, value in given.items() if value is not None}
    return Gpu(name=name, pattern=pattern, memory_bytes=int(memory * GB), peak=MappingProxyType(peak))


# Dense peaks (no 2:4 sparsity) with fp32 accumulation, from the vendors' data sheets; fp32 is the CUDA-core rate,
# because fp32 compute here does not use TF32, and fp64 the tensor-core (matrix) rate where there is one.
# The first pattern that matches wins, so longer names stand first.
GPUS: tuple[Gpu, ...] = (
    _gpu("B300", r"b300", 288, 2250.0, 75.0, 1.2),  # NVIDIA Blackwell Ultra data sheet (HGX B300, per GPU)
    _gpu("B200", r"b200", 180, 2250.0, 75.0, 37.0),  # NVIDIA Blackwell data sheet (HGX B200, per GPU)
    _gpu("GH200", r"gh200", 96, 989.4, 66.9, 66.9),  # NVIDIA GH200 data sheet (96 GB HBM3)
    _gpu("H200", r"h200", 141, 989.4, 66.9, 66.9),  # NVIDIA H200 data sheet (SXM)
    _gpu("H100 NVL", r"h100.*nvl", 94, 835.0, 60.0, 60.0),  # NVIDIA H100 NVL data sheet
    _gpu("H100 PCIe", r"h100.*pcie", 80, 756.0, 51.0, 51.0),  # NVIDIA H100 data sheet (PCIe)
    _gpu("H100", r"h100", 80, 989.4, 66.9, 66.9),  # NVIDIA H100 data sheet (SXM5)
    _gpu("H800", r"h800", 80, 989.4, 66.9, 1.0),  # NVIDIA H800 data sheet (fp64 cut)
    _gpu("H20", r"h20\b", 96, 148.0, 44.0, 1.0),  # NVIDIA H20 data sheet
    _gpu("A100 80GB", r"a100.*80", 80, 312.0, 19.5, 19.5),  # NVIDIA A100 data sheet
    _gpu("A100", r"a100", 40, 312.0, 19.5, 19.5),  # NVIDIA A100 data sheet
    _gpu("A800", r"a800", 80, 312.0, 19.5, 9.7),  # NVIDIA A800 data sheet
    _gpu("A40", r"a40\b", 48, 149.7, 37.4, 0.6),  # NVIDIA A40 data sheet
    _gpu("A30", r"a30\b", 24, 165.0, 10.3, 10.3),  # NVIDIA A30 data sheet
    _gpu("A10", r"a10\b", 24, 125.0, 31.2, 0.5),  # NVIDIA A10 data sheet
    _gpu("L40S", r"l40s", 48, 362.0, 91.6, 1.4),  # NVIDIA L40S data sheet
    _gpu("L40", r"l40\b", 48, 181.0, 90.5, 1.4),  # NVIDIA L40 data sheet
    _gpu("L4", r"l4\b", 24, 121.0, 30.3, 0.5),  # NVIDIA L4 data sheet
    _gpu("RTX 4090", r"(?:rtx ?)?4090", 24, 165.2, 82.6, 1.3),  # NVIDIA Ada architecture paper, appendix A
    _gpu("RTX 3090", r"(?:rtx ?)?3090", 24, 71.0, 35.6, 0.6),  # NVIDIA GA102 architecture paper, appendix A
    _gpu("V100 32GB", r"v100.*32", 32, None, 15.7, 7.8),  # NVIDIA V100 data sheet; no bf16
    _gpu("V100", r"v100", 16, None, 15.7, 7.8),  # NVIDIA V100 data sheet; no bf16
    _gpu("MI355X", r"mi355", 288, 2500.0, 157.3, 78.6),  # AMD Instinct MI355X data sheet
    _gpu("MI325X", r"mi325", 256, 1307.4, 163.4, 163.4),  # AMD Instinct MI325X data sheet
    _gpu("MI300X", r"mi300", 192, 1307.4, 163.4, 163.4),  # AMD Instinct MI300X data sheet
    _gpu("MI250X", r"mi250", 64, 191.5, 23.9, 47.9),  # AMD Instinct MI250X data sheet, per die as torch sees it
)


def find_gpu(name: str | None) -> Gpu | None:
    """The GPU of a device name ('NVIDIA H100 80GB HBM3') or a Slurm type ('h100'); None when it is not in the table."""
    if not name:
        return None
    spaced = re.sub(r"[_\-]+", " ", name.lower())
    return next((gpu for gpu in GPUS if re.search(rf"(?<![a-z0-9])(?:{gpu.pattern})(?!\d)", spaced)), None)


def peak_flops(device_name: str | None, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s for matmuls in `dtype`; None for a CPU or an unknown GPU, never a guess."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.peak.get(dtype)


def mfu(flops: float, *, seconds: float, world_size: int, device_name: str | None, dtype: str) -> float | None:
    """Model FLOPs utilisation, 0 to 1; None where the peak is unknown or no time has passed."""
    peak = peak_flops(device_name, dtype)
    if peak is None or seconds <= 0:
        return None
    return flops / (seconds * world_size * peak)
