"""FLOPs by hand, and against torch's own counter on a functional transformer; peaks only where they are known."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from trainer.config import Config, load
from trainer.flops import GPUS, find_gpu, mfu, peak_flops, step_flops

CONFIGS = Path(__file__).parents[2] / "configs"


def config(name: str, *overrides: str) -> Config:
    loaded = load(CONFIGS / f"{name}.yaml", overrides=overrides)
    assert loaded.config is not None, loaded.problems
    return loaded.config


def counted_flops(c: Config) -> int:
    """torch's count of forward and backward of a plain transformer with full (T²) attention, written out here."""
    m, length = c.model.model_config, c.tokens.sequence_length
    batch, heads, kv, d = c.global_batch_size, m.num_attention_heads, m.num_key_value_heads, m.head_dim
    shapes = {
        "q": (heads * d, m.hidden_size), "k": (kv * d, m.hidden_size), "v": (kv * d, m.hidden_size),
        "o": (m.hidden_size, heads * d), "up": (m.intermediate_size, m.hidden_size),
        "down": (m.hidden_size, m.intermediate_size),
        **({} if m.model_type == "starcoder2" else {"gate": (m.intermediate_size, m.hidden_size)}),
    }  # fmt: skip
    layers = [
        {name: torch.empty(shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
        for _ in range(m.num_hidden_layers)
    ]
    head = torch.empty(m.vocab_size, m.hidden_size, device="meta", requires_grad=True)
    x_BTD = torch.empty(batch, length, m.hidden_size, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        for w in layers:
            q, k, v = (F.linear(x_BTD, w[name]).view(batch, length, -1, d).transpose(1, 2) for name in ("q", "k", "v"))
            k, v = (t.repeat_interleave(heads // kv, dim=1) for t in (k, v))
            scores = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
            x_BTD = x_BTD + F.linear((scores @ v).transpose(1, 2).flatten(2), w["o"])
            up = F.linear(x_BTD, w["up"])
            inner = F.silu(F.linear(x_BTD, w["gate"])) * up if "gate" in w else F.gelu(up)
            x_BTD = x_BTD + F.linear(inner, w["down"])
        F.linear(x_BTD, head).sum().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.model_config.num_key_value_heads=4",),
        ("model.model_config.num_key_value_heads=1", "model.model_config.head_dim=32"),
        ("tokens.micro_batch_size=3", "tokens.sequence_length=64", "model.model_config.vocab_size=1021"),
        ("model.model_config.model_type=starcoder2",),
        ("model.model_config.model_type=smollm3", "model.model_config.hidden_act=relu2"),
    ],
)
def test_full_attention_equals_torchs_counter(overrides: tuple[str, ...]) -> None:
    c = config("tiny", *overrides)
    assert step_flops(c).full_attn == counted_flops(c)


def test_the_seed_model_by_hand() -> None:
    """6 N T + attention, on paper: N = 1.46e9 layer weights and a 49,152 × 2,048 head, 64 samples of 4,096 tokens."""
    flops = step_flops(config("seed-1.7b"))
    tokens = 64 * 4096
    layer = 2 * 2048 * 64 * (32 + 8) + 3 * 2048 * 8192
    matmul = 6 * tokens * (24 * layer + 2048 * 49152)
    pairs = 64 * 4096 * 4097 // 2
    assert flops.exact == matmul + 3 * 4 * 32 * 64 * 24 * pairs
    assert flops.full_attn == matmul + 3 * 4 * 32 * 64 * 24 * 64 * 4096**2
    assert flops.megatron == matmul + 3 * 4 * 32 * 64 * 24 * 64 * 4096**2 // 2


def test_the_seed_texts_throughput_is_18_percent_not_54() -> None:
    flops = step_flops(config("seed-1.7b"))
    seconds = 64 * 4096 / (14_850 * 64)
    share = mfu(flops.full_attn, seconds=seconds, world_size=64, device_name="NVIDIA H100 80GB HBM3", dtype="bfloat16")
    assert share == pytest.approx(0.17, abs=0.02)


@given(st.sampled_from([(8, 1, 1), (1, 8, 1), (2, 2, 2), (4, 1, 2)]), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_the_mesh_does_not_change_the_work(mesh: tuple[int, int, int], accumulation: int) -> None:
    """Equal global batch, any layout: equal FLOPs, except for Megatron's padded vocabulary."""
    dp, pp, tp = mesh
    common = ("model.model_config.num_hidden_layers=8", "model.model_config.vocab_size=257")
    batch = f"tokens.batch_accumulation_per_replica={accumulation * 8 // dp}"
    laid = config("tiny", *common, batch, f"parallelism.dp={dp}", f"parallelism.pp={pp}", f"parallelism.tp={tp}")
    alone = config("tiny", *common, f"tokens.batch_accumulation_per_replica={accumulation * 8}")
    assert (step_flops(laid).exact, step_flops(laid).full_attn) == (
        step_flops(alone).exact,
        step_flops(alone).full_attn,
    )
    assert (step_flops(laid).megatron > step_flops(alone).megatron) == (tp > 1)


def test_what_is_recomputed_counts_for_the_hardware_alone() -> None:
    """Full: one forward of the layers more, 4/3 of their work. Selective: the attention core's forward."""
    plain = step_flops(config("tiny"))
    c = config("tiny", "model.recompute=full")
    layers = step_flops(config("tiny", "model.model_config.vocab_size=1")).exact
    head = 3 * 2 * 64 * c.tokens_per_step  # of one row, the smallest there is
    for mode, again in (("full", (layers - head) / 3), ("selective", 4 * 4 * 16 * 2 * 8 * 32 * 33 // 2)):
        flops = step_flops(config("tiny", f"model.recompute={mode}"))
        assert (flops.exact, flops.full_attn, flops.megatron) == (plain.exact, plain.full_attn, plain.megatron)
        assert flops.hardware == plain.hardware + again
    half = step_flops(config("tiny", "model.recompute=full", "model.recompute_interval=2"))
    assert 2 * (half.hardware - plain.exact) == (layers - head) / 3 and plain.hardware == plain.exact


def test_documents_take_away_the_pairs_between_them() -> None:
    """Samples of 32 tokens cut into two documents are, for attention, twice as many samples of 16."""
    for mode in ("none", "selective"):
        long = step_flops(config("tiny", f"model.recompute={mode}"))
        short = step_flops(config("tiny", f"model.recompute={mode}", "tokens.sequence_length=16"), num_samples=8)
        left = short.pairs - long.pairs
        assert long.exact + left * long.exact_per_pair == short.exact
        assert long.hardware + left * long.hardware_per_pair == short.hardware


def test_conventions_are_ordered_and_far_apart_on_long_sequences() -> None:
    flops = step_flops(config("tiny", "tokens.sequence_length=64"))
    assert flops.megatron < flops.exact < flops.full_attn


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("geforce_rtx_3090", "RTX 3090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("h100", "H100"),
        ("nvidia_h100_80gb_hbm3", "H100"),
        ("NVIDIA A10G", None),
        ("NVIDIA B2000", None),
        ("Radeon 100", None),
        ("cpu", None),
        ("", None),
        (None, None),
    ],
)
def test_gpus_are_found_by_name_or_not_at_all(device: str | None, name: str | None) -> None:
    found = find_gpu(device)
    assert (found.name if found else None) == name


def test_unknown_is_none_never_zero() -> None:
    assert peak_flops("cpu", "float32") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None
    known = mfu(1e12, seconds=1.0, world_size=2, device_name="NVIDIA H200", dtype="bfloat16")
    assert known == pytest.approx(1e12 / (2 * 989.4e12))
    assert mfu(1e12, seconds=1.0, world_size=2, device_name="cpu", dtype="bfloat16") is None
    assert mfu(1e12, seconds=0.0, world_size=2, device_name="NVIDIA H200", dtype="bfloat16") is None


def test_every_gpu_of_the_table_is_found_by_its_own_name() -> None:
    for gpu in GPUS:
        assert find_gpu(gpu.name) == gpu
        assert gpu.memory_bytes >= 16e9 and all(peak > 1e11 for peak in gpu.peak.values())
