"""`make bench`: speed rows as ratios within one run, written to build/bench.json.

Each ratio (ours ÷ other) is the median of alternating pairs, so that a change of the machine's mood hits both sides; a
spread (max − min of the pairs' ratios, over the median) above 20 % is said. A side of a pair is the fastest of three
turns (of up to ten where a turn takes a tenth of a second), which alternate too: another process on the core can only
add time, and adds it to either side. The process stays on one core and collects no garbage while it is timed.
fp32, 1 thread, weights at σ = 0.02: with N(0, 1) weights the matrix products run into denormals and measure something
else.

    python ops/bench/bench.py [--out build/bench.json] [--pairs 7] [--only ROW]
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[2]
SPREAD_LIMIT = 0.20
TURNS, MOST_TURNS = 3, 10

SHAPE = {"hidden": 256, "ffn": 688, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 8192}
BATCH = {"micro_batch": 4, "sequence": 256, "micro_batches": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of bench.json. For plain timings `other` is the limit in seconds and `ratio` ours ÷ limit."""

    id: str
    what: str
    ours: float
    other: float
    ratio: float
    spread: float
    shape: str
    threads: int


@contextmanager
def steady() -> Iterator[None]:
    """One core for this process and its children, and no garbage collection, until the block ends."""
    cores = os.sched_getaffinity(0)
    gc.collect()
    gc.disable()
    os.sched_setaffinity(0, {max(cores)})  # the last: interrupts are mostly served by the first
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        gc.enable()


def fastest(*functions: Callable[[], object], turns: int = TURNS) -> tuple[float, ...]:
    """Seconds of each function, the fastest of `turns` turns in which they alternate."""
    every = [[timed(function) for function in functions] for _ in range(turns)]
    return tuple(min(times) for times in zip(*every, strict=True))


def turns_for(seconds: float) -> int:
    """Turns that take about a second together, within bounds: a short one is the easier to disturb."""
    return min(MOST_TURNS, max(TURNS, round(1 / seconds)))


def timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def spread_of(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def ours_step(threads: int) -> Callable[[], object]:
    """One optimizer step of the Engine in one process."""
    import torch

    from trainer.config import model as c
    from trainer.data.batch import StepBatch
    from trainer.engine import Engine
    from trainer.mesh.context import ParallelContext
    from trainer.mesh.topology import Topology

    torch.set_num_threads(threads)
    config = c.Config(
        general=c.General(project="bench", run="single-vs-plain"),
        parallelism=c.Parallelism(dp=1, pp=1, tp=1),
        model=c.Model(
            model_config=c.ModelConfig(
                hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["ffn"], num_hidden_layers=SHAPE["layers"],
                num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], vocab_size=SHAPE["vocab"],
            ),
            dtype="float32",
        ),
        optimizer=c.Optimizer(learning_rate_scheduler=c.LearningRateScheduler(learning_rate=1e-4)),
        tokens=c.Tokens(
            sequence_length=BATCH["sequence"], train_steps=1, micro_batch_size=BATCH["micro_batch"],
            batch_accumulation_per_replica=BATCH["micro_batches"],
        ),
        data=c.Data(dataset=c.Dataset(dataset_folder=["unused"])),
    )  # fmt: skip
    engine = Engine(config, ParallelContext(Topology(), device=torch.device("cpu")))
    engine.init_weights()
    ids, labels, positions = batch()
    step_batch = StepBatch(
        input_ids_MBT=ids, labels_MBT=labels, position_ids_MBT=positions, sample_ids=tuple(range(ids[..., 0].numel()))
    )
    count = iter(range(1, 1 << 30))
    return lambda: engine.train_step(step_batch, lr=1e-4, weight_decay=0.1, adam_t=next(count))


def plain_step(threads: int) -> Callable[[], object]:
    """The loop anyone would write: transformers' Llama, its own loss, gradient accumulation, clipping, fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    config = LlamaConfig(
        hidden_size=SHAPE["hidden"], intermediate_size=SHAPE["ffn"], num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"], vocab_size=SHAPE["vocab"],
        initializer_range=0.02, tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids, labels, positions = batch()

    def step() -> None:
        for i in range(ids.shape[0]):
            logits = model(input_ids=ids[i], position_ids=positions[i]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[i].flatten())
            (loss / ids.shape[0]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def batch() -> tuple[Any, Any, Any]:
    """(input_ids, labels, position_ids), each [micro_batches, micro_batch, sequence]."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (BATCH["micro_batches"], BATCH["micro_batch"], BATCH["sequence"])
    ids = torch.randint(0, SHAPE["vocab"], shape, generator=generator)
    return ids, ids.roll(-1, -1), torch.arange(BATCH["sequence"]).expand(shape)


def single_vs_plain(pairs: int) -> Row:
    ours, plain = ours_step(1), plain_step(1)
    with steady():
        for step in (ours, plain) * TURNS:
            step()
        times = [fastest(ours, plain) for _ in range(pairs)]
    ratios = [theirs / mine for mine, theirs in times]
    tokens = BATCH["micro_batches"] * BATCH["micro_batch"] * BATCH["sequence"]
    return Row(
        id="single-vs-plain", what="training tokens/s, one process, against a plain transformers loop (clipped, fused)",
        ours=tokens / statistics.median(mine for mine, _ in times),
        other=tokens / statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(ratios), spread=spread_of(ratios), threads=1,
        shape=" ".join(f"{key}={value}" for key, value in (SHAPE | BATCH).items()) + " fp32",
    )  # fmt: skip


def command_row(row_id: str, command: list[str], limit_s: float, pairs: int) -> Row:
    """Wall time of a command against its limit. Raises CalledProcessError if it fails."""

    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)

    with steady():
        turns = turns_for(timed(run))
        times = [fastest(run, turns=turns)[0] for _ in range(pairs)]
    ours = statistics.median(times)
    return Row(
        id=row_id, what=f"seconds of `{' '.join(command[2:])}` against its limit", ours=ours, other=limit_s,
        ratio=ours / limit_s, spread=spread_of(times), shape="a new interpreter each time", threads=1,
    )  # fmt: skip


def rows(pairs: int) -> dict[str, Callable[[], Row]]:
    pawl = [sys.executable, "-m", "orchestrator"]
    return {
        "single-vs-plain": lambda: single_vs_plain(pairs),
        "pawl-help-s": lambda: command_row("pawl-help-s", [*pawl, "--help"], 0.3, pairs),
        "pawl-check-s": lambda: command_row("pawl-check-s", [*pawl, "check", "configs/demo.yaml"], 1.2, pairs),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench.json")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs per row, at least 5")
    parser.add_argument("--only", help="run this row alone")
    args = parser.parse_args(argv)
    if args.pairs < 5:
        parser.error(f"--pairs is {args.pairs}; a median needs at least 5")
    table = rows(args.pairs)
    if args.only is not None and args.only not in table:
        parser.error(f"unknown row {args.only!r}; rows: {', '.join(table)}")
    sys.path.insert(0, str(ROOT))
    done: list[Row] = []
    for name in [args.only] if args.only else table:
        row = table[name]()
        done.append(row)
        warning = f"  SPREAD over {SPREAD_LIMIT:.0%}: do not trust" if row.spread > SPREAD_LIMIT else ""
        print(f"{row.id:<18} {row.ours:10.3f} / {row.other:10.3f} = {row.ratio:6.3f}  spread {row.spread:.0%}{warning}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"rows": [asdict(row) for row in done]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
