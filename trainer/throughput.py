"""How fast a step was: tokens per second, and model FLOPs utilisation in its three usual conventions.

MFU is model FLOPs per second over the peak of all devices. "Model FLOPs" is counted three ways in the literature, with
numbers up to a fifth apart on long sequences; so each has its own name (trainer/flops.py) and all three are recorded:
exact causal pairs (pawl's own), full attention (nanotron, torchtitan) and Megatron's formula. HFU, hardware FLOPs
utilisation, counts what is recomputed as well.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What one step computes. FLOPs of the whole step over all ranks; peak in FLOP/s of all devices, None = unknown.

    `pairs` of attention are in `flops` and `flops_hardware`, at so many FLOPs each.
    """

    tokens: int
    samples: int
    flops: float
    flops_full_attn: float
    flops_megatron: float
    flops_hardware: float
    peak_flops_per_s: float | None
    pairs: int = 0
    flops_per_pair: float = 0.0
    hardware_per_pair: float = 0.0

    def of_pairs(self, pairs: int) -> "StepCost":
        """The cost where the samples' documents left `pairs` of attention's (query, key) pairs."""
        less = self.pairs - pairs
        flops, hardware = self.flops - less * self.flops_per_pair, self.flops_hardware - less * self.hardware_per_pair
        return replace(self, pairs=pairs, flops=flops, flops_hardware=hardware)

    def if_trained(self, trained: bool) -> "StepCost":
        """The cost itself, or that of a step passed over: its samples are drawn, nothing is computed."""
        if trained:
            return self
        return replace(self, tokens=0, flops=0.0, flops_full_attn=0.0, flops_megatron=0.0, flops_hardware=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens per second over all ranks; MFUs as ratios, None where the peak is unknown."""

    tokens_per_s: float
    mfu: float | None
    mfu_full_attn: float | None
    mfu_megatron: float | None
    hfu: float | None


def rates(cost: StepCost, seconds: float) -> Rates:
    """The rates of a step that took `seconds` > 0."""

    def mfu(flops: float) -> float | None:
        return None if cost.peak_flops_per_s is None else flops / (seconds * cost.peak_flops_per_s)

    return Rates(
        tokens_per_s=cost.tokens / seconds,
        mfu=mfu(cost.flops),
        mfu_full_attn=mfu(cost.flops_full_attn),
        mfu_megatron=mfu(cost.flops_megatron),
        hfu=mfu(cost.flops_hardware),
    )
