"""What ops/gpu_check.sh measures: a short run on one device, the same run resumed, and its memory, as a table.

    check    pawl check CONFIG --here on the config as it will be run
    train    N steps; loss finite and falling; tokens/s, MFU
    memory   peak of the allocator against what the config's check had predicted
    resume   the checkpoint of the middle, trained again to the end: bit-equal losses, or how far apart
    variants the same run recomputed, with weight gradients put off, compiled: losses, and speed against the first run
    profile  the trace of a step: how many kernels the device ran

Everything goes through public commands; the tokens are random with a skewed distribution, so that there is something
to learn.
"""

import argparse
import gzip
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.beat import HEADER, HEADER_BYTES, MAGIC, RANK_STRIDE, STATS_AT, STATS_BODY, VERSION, Stats
from trainer.data.format import METADATA, Metadata, Shard, docs_file, file_xxh3

ROUNDING = 1e-2  # bf16 with atomics: farther apart than this is no rounding
MEMORY_BAND = (0.5, 1.25)  # peak over prediction
VARIANTS: dict[str, tuple[str, ...]] = {
    "recompute full": ("model.recompute=full",),
    "recompute selective": ("model.recompute=selective",),
    "zb-v": ("parallelism.pp_engine=zb-v",),
    "compile": ("model.compile=block",),
}
"""What must not change the losses but for rounding, as changes of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `ok` None: measured, not judged."""

    what: str
    result: str
    ok: bool | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check pawl's trainer on one device.")
    parser.add_argument("config", nargs="?", default="configs/smollm-135m.yaml")
    parser.add_argument("--steps", type=int, default=20, help="even; a checkpoint is made in the middle")
    parser.add_argument("--keep", type=Path, help="work here and leave everything in place")
    parser.add_argument(
        "--variants", default=",".join(VARIANTS), metavar="A,B", help=f"of {', '.join(VARIANTS)}; '' for none"
    )
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="change a value of the config")
    args = parser.parse_args()
    variants = [name.strip() for name in args.variants.split(",") if name.strip()]
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(VARIANTS)}")
    if args.keep is not None:
        args.keep.mkdir(parents=True, exist_ok=True)
        return check(args.config, args.keep.absolute(), steps=args.steps, changes=args.set, variants=variants)
    with tempfile.TemporaryDirectory(prefix="pawl-gpu-check-") as work:
        return check(args.config, Path(work), steps=args.steps, changes=args.set, variants=variants)


def check(config: str, work: Path, *, steps: int, changes: list[str], variants: list[str]) -> int:
    """Run all checks below `work`, print the table; 0 if no row is wrong."""
    facts, file = derive(config, work, steps=steps, changes=changes)
    rows = [pawl_check(file)]
    train(file, work / "first", memory=work / "memory")
    first = lines(work / "first")
    rows += judge_training(first, steps=steps)
    rows.append(judge_memory(read_stats(work / "memory"), facts))
    middle = sorted((work / "first" / "checkpoints").glob("step-*"))[0]
    shutil.copytree(middle, work / "second" / "checkpoints" / middle.name)
    train(file, work / "second", memory=None)
    rows.append(judge_resume(first, lines(work / "second"), from_step=steps // 2))
    for name in variants:
        folder = work / name.replace(" ", "-")
        _, varied = derive(config, work, steps=steps, changes=[*changes, *VARIANTS[name]])
        train(varied, folder, memory=None)
        rows.append(judge_variant(name, first, lines(folder)))
    _, profiled = derive(config, work, steps=4, changes=[*changes, "profiler={first_step: 3, num_steps: 1}"])
    train(profiled, work / "profiled", memory=None)
    rows.append(judge_profile(work / "profiled"))
    print()
    for row in rows:
        mark = {None: "", True: "ok", False: "WRONG"}[row.ok]
        print(f"{mark:<6}{row.what:<20}{row.result}")
    return 1 if any(row.ok is False for row in rows) else 0


def derive(config: str, work: Path, *, steps: int, changes: list[str]) -> tuple[dict[str, Any], Path]:
    """The config cut short to one rank, over tokens made for it: its launch facts and its file.

    Exits where the config is wrong.
    """
    vocab = int(trainer_check(config, changes)["facts"]["vocab_size"])
    tokens = write_tokens(work / "tokens", vocab=vocab)
    scheduler = "optimizer.learning_rate_scheduler"
    settings = [
        *changes,
        "general.run=gpu-check",
        *(f"parallelism.{axis}=1" for axis in ("dp", "pp", "tp", "cp", "expert_parallel_size")),
        "slurm.nodes=1",
        "slurm.ranks_per_node=1",
        "tokenizer=null",
        f"data={json.dumps({'dataset': {'dataset_folder': [str(tokens)]}})}",
        f"tokens.train_steps={steps}",
        "tokens.batch_accumulation_per_replica=2",
        f"checkpoints.checkpoint_interval={steps // 2}",
        f"{scheduler}.lr_warmup_steps=2",
        f"{scheduler}.lr_decay_starting_step=2",
        f"{scheduler}.lr_decay_steps=null",
    ]
    told = trainer_check(config, settings)
    file = work / "gpu-check.yaml"
    file.write_text(told["merged_yaml"])
    return told["facts"], file


def trainer_check(config: str, settings: list[str]) -> dict[str, Any]:
    """`trainer check --json`; exits with its problems if the config does not hold."""
    sets = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "trainer", "check", config, "--json", *sets]
    done = subprocess.run(command, capture_output=True, text=True)
    told: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    if not told.get("facts"):
        sys.exit(f"gpu_check: {config} does not hold: {told.get('problems') or done.stderr}")
    return told


def write_tokens(folder: Path, *, vocab: int, num_tokens: int = 2_000_000) -> Path:
    """One shard of ids whose frequency falls with their number, a document every 1,000 tokens."""
    if (folder / METADATA).exists():
        return folder
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0).power(0.1, num_tokens)
    dtype = np.dtype("<u2" if vocab <= 65_536 else "<u4")
    ids = np.minimum(draws * vocab, vocab - 1).astype(dtype)
    ids[999::1000] = 0
    file = folder / "shard-00000.bin"
    ids.tofile(file)
    ends = np.arange(1000, num_tokens + 1, 1000, dtype="<u8")
    np.save(folder / docs_file(file.name), ends)
    shard = Shard(
        file=file.name, tokens=num_tokens, documents=len(ends), xxh3=file_xxh3(file), max_id=int(ids.max())
    )  # fmt: skip
    metadata = Metadata(
        dtype="uint16" if vocab <= 65_536 else "uint32",
        vocab_size=vocab,
        eos_id=0,
        num_tokens=num_tokens,
        num_documents=len(ends),
        tokenizer={"path": "none", "sha256": None},
        shards=(shard,),
        source={"made": "ops/gpu_check"},
    )
    (folder / METADATA).write_text(json.dumps(metadata.to_json()))
    return folder


def pawl_check(file: Path) -> Row:
    """`pawl check --here` on the config as it will be run."""
    done = subprocess.run([sys.executable, "-m", "orchestrator", "check", str(file), "--here"], text=True)
    return Row(what="check", result=f"pawl check --here: exit {done.returncode}", ok=done.returncode == 0)


def train(file: Path, run_dir: Path, *, memory: Path | None) -> None:
    """Train to the end in one process; exits where that fails. `memory`: a file for beats and stats."""
    command = [sys.executable, "-m", "trainer", "train", "--config-file", str(file), "--run-dir", str(run_dir)]
    if memory is not None:
        header = HEADER.pack(MAGIC, VERSION, 1, RANK_STRIDE, HEADER_BYTES)
        memory.write_bytes(header.ljust(HEADER_BYTES + RANK_STRIDE, b"\0"))
        command += ["--shm", str(memory)]
    done = subprocess.run(command, env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    if done.returncode != 0:
        sys.exit(f"gpu_check: the run in {run_dir} ended with exit code {done.returncode}; see its output above.")


def lines(run_dir: Path) -> dict[int, dict[str, Any]]:
    """train.jsonl by step."""
    text = (run_dir / "attempts/0000/cycles/0000/train.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def read_stats(memory: Path) -> Stats:
    """The stats block that the rank left in its shared memory."""
    values = STATS_BODY.unpack_from(memory.read_bytes(), HEADER_BYTES + STATS_AT + 8)
    names = [name for name in Stats.__dataclass_fields__ if name != "step_seconds_histogram"]
    return Stats(**dict(zip(names, values, strict=False)))


def steady_lines(run: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the steps after those that warm up."""
    return [run[step] for step in sorted(run) if step > min(3, len(run) // 2)]


def judge_training(first: dict[int, dict[str, Any]], *, steps: int) -> list[Row]:
    """Loss and speed."""
    losses = [first[step]["loss"] for step in sorted(first)]
    falling = None not in losses and len(losses) == steps and losses[-1] < losses[0]
    steady = steady_lines(first)
    tokens_per_s = statistics.median(line["tokens_per_s"] for line in steady)
    speed = f"{tokens_per_s:,.0f} tokens/s, step {statistics.median(line['step_time_s'] for line in steady):.3f} s"
    for name in ("mfu", "mfu_full_attn", "mfu_megatron"):
        known = [line[name] for line in steady if line[name] is not None]
        speed += f", {name} " + (f"{100 * statistics.median(known):.1f} %" if known else "unknown")
    return [
        Row(what="train", result=f"{len(losses)} steps, loss {losses[0]} → {losses[-1]}", ok=falling),
        Row(what="speed", result=speed, ok=None),
    ]


def judge_memory(stats: Stats, facts: dict[str, Any]) -> Row:
    """The allocator's peak against the prediction of `check`."""
    predicted = int(facts["memory_per_rank_bytes"]["total"])
    if stats.memory_peak_bytes == 0:
        return Row(what="memory", result=f"no accelerator was used; predicted {predicted / 1e9:.2f} GB", ok=False)
    ratio = stats.memory_peak_bytes / predicted
    text = f"peak {stats.memory_peak_bytes / 1e9:.2f} GB, predicted {predicted / 1e9:.2f} GB, ratio {ratio:.2f}"
    return Row(what="memory", result=text, ok=MEMORY_BAND[0] <= ratio <= MEMORY_BAND[1])


def judge_resume(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]], *, from_step: int) -> Row:
    """Losses after the resume against those of the run that was not stopped."""
    expected = [step for step in sorted(first) if step > from_step]
    if sorted(second) != expected:
        return Row(what="resume", result=f"trained steps {sorted(second)} instead of {expected}", ok=False)
    apart = [abs(second[step]["loss"] - first[step]["loss"]) / abs(first[step]["loss"]) for step in expected]
    equal = sum(distance == 0 for distance in apart)
    text = f"{equal} of {len(expected)} losses bit-equal, largest relative distance {max(apart):.1e}"
    return Row(what="resume", result=text, ok=math.isfinite(max(apart)) and max(apart) < ROUNDING)


def judge_variant(name: str, first: dict[int, dict[str, Any]], varied: dict[int, dict[str, Any]]) -> Row:
    """Losses against those of the first run, and how fast it was."""
    if sorted(varied) != sorted(first):
        return Row(what=name, result=f"trained steps {sorted(varied)} instead of {sorted(first)}", ok=False)
    apart = [abs(varied[step]["loss"] - first[step]["loss"]) / abs(first[step]["loss"]) for step in sorted(first)]
    equal = sum(distance == 0 for distance in apart)
    times = [statistics.median(line["step_time_s"] for line in steady_lines(run)) for run in (varied, first)]
    text = f"{equal} of {len(apart)} losses bit-equal, largest relative distance {max(apart):.1e}"
    text += f", step {times[0]:.3f} s ({times[0] / times[1]:.2f} of the first run's)"
    return Row(what=name, result=text, ok=math.isfinite(max(apart)) and max(apart) < ROUNDING)


def judge_profile(run_dir: Path) -> Row:
    """Whether the trace of a step was written, and what it holds."""
    traces = sorted((run_dir / "profile").glob("*/rank-00000.json.gz"))
    if len(traces) != 1:
        return Row(what="profile", result=f"{len(traces)} traces instead of 1", ok=False)
    with gzip.open(traces[0], "rt") as file:
        kinds = [event.get("cat") for event in json.load(file)["traceEvents"]]
    kernels, operators = kinds.count("kernel"), kinds.count("cpu_op")
    return Row(what="profile", result=f"{operators} operators, {kernels} kernels of the device", ok=operators > 0)


if __name__ == "__main__":
    sys.exit(main())
