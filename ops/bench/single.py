"""Training tokens per second in one process, against the loop anyone would write."""

import statistics
from collections.abc import Callable
from typing import Any

from ops.bench.models import bench_config, engine_of, random_batch
from ops.bench.rows import Row, in_pairs, spread_of


def single_vs_plain(pairs: int) -> Row:
    """Whole optimizer steps of the Engine against those of `plain_step`, on the same tokens and shape."""
    config = bench_config()
    tokens = config.tokens_per_step
    times = in_pairs(ours_step(), plain_step(), pairs)
    ratios = [theirs / mine for mine, theirs in times]
    shape, counts = config.model.model_config, config.tokens
    sizes = {
        "hidden": shape.hidden_size, "ffn": shape.intermediate_size, "layers": shape.num_hidden_layers,
        "heads": shape.num_attention_heads, "kv_heads": shape.kv_heads, "vocab": shape.vocab_size,
        "micro_batch": counts.micro_batch_size, "sequence": counts.sequence_length,
        "micro_batches": counts.batch_accumulation_per_replica,
    }  # fmt: skip
    return Row(
        id="single-vs-plain", what="training tokens/s, one process, against a plain transformers loop (clipped, fused)",
        ours=tokens / statistics.median(mine for mine, _ in times),
        other=tokens / statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(ratios), spread=spread_of(ratios), threads=1,
        shape=" ".join(f"{key}={value}" for key, value in sizes.items()) + " fp32",
    )  # fmt: skip


def ours_step() -> Callable[[], object]:
    """One optimizer step of the Engine in one process."""
    import torch

    torch.set_num_threads(1)
    config = bench_config()
    engine, batch, count = engine_of(config), random_batch(config), iter(range(1, 1 << 30))
    return lambda: engine.train_step(batch, lr=1e-4, weight_decay=0.1, adam_t=next(count))


def plain_step() -> Callable[[], object]:
    """transformers' Llama, its own loss, gradient accumulation, clipping, fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    ours = bench_config()
    shape, batch = ours.model.model_config, random_batch(ours)
    config = LlamaConfig(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab_size, initializer_range=0.02,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    m = batch.num_micro_batches

    def step() -> None:
        for i in range(m):
            logits = model(input_ids=batch.input_ids_MBT[i], position_ids=batch.position_ids_MBT[i]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_MBT[i].flatten())
            (loss / m).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
