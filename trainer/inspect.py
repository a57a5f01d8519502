"""`python -m trainer inspect CHECKPOINT`: what a checkpoint holds. No torch.

--verify: whether it is whole. --diff OTHER: in what it differs from another.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from trainer.checkpoint.index import SavedTensor
from trainer.checkpoint.naming import CONFIG
from trainer.checkpoint.reader import Checkpoint, open_checkpoint
from trainer.checkpoint.tensorfile import ITEM_BYTES
from trainer.checkpoint.verify import problems
from trainer.errors import CheckpointInvalid

_NUMBER = re.compile(r"\.(\d+)\.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `inspect` on a parser."""
    parser.add_argument("checkpoint", type=Path, help="the folder of one checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every file and compare sizes and digests")
    parser.add_argument("--diff", type=Path, metavar="OTHER", help="in what it differs from another checkpoint")
    parser.add_argument("--config", action="store_true", help="print the config it was written with")
    parser.add_argument("--short", action="store_true", help="without the table of tensors")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print the contents; 89 if the checkpoint is not whole. Raises CheckpointInvalid if its tables do not read."""
    checkpoint = open_checkpoint(args.checkpoint)
    if args.diff is not None:
        from trainer.differences import differences, lines

        found = differences(checkpoint, open_checkpoint(args.diff))
        print(json.dumps(found, indent=2) if args.json else "\n".join(lines(found)))
        return 0
    if args.config and not args.json:
        print(config_text(checkpoint) or "", end="")
        return 0
    if args.verify and not args.json:
        total = checkpoint.manifest.total_bytes
        print(f"reading {human_bytes(total)} of {args.checkpoint} …", file=sys.stderr, flush=True)
    bad = problems(args.checkpoint) if args.verify else None
    facts = describe(checkpoint)
    if args.json:
        told = None if bad is None else [{"file": str(error.bad_file), "message": str(error)} for error in bad]
        print(json.dumps({**facts, "problems": told}, indent=2))
    else:
        print(table(facts, with_tensors=not args.short))
        print("not verified (--verify reads everything)" if bad is None else "damaged" if bad else "verified")
    for error in bad or ():
        print(f"error: {error}", file=sys.stderr)
    return CheckpointInvalid.exit_code if bad else 0


def config_text(checkpoint: Checkpoint) -> str | None:
    """The YAML the checkpoint was written with; None where it carries none (an import)."""
    if checkpoint.manifest.file(CONFIG) is None:
        return None
    try:
        return (checkpoint.path / CONFIG).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"{checkpoint.path / CONFIG}: {error}", bad_file=checkpoint.path / CONFIG
        ) from error  # fmt: skip


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts of a checkpoint as plain values."""
    manifest, index = checkpoint.manifest, checkpoint.index
    return {
        "path": str(checkpoint.path),
        "run": manifest.run,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "state": manifest.state.to_json(),
        "mesh": dict(index.mesh),
        "num_parameters": sum(math.prod(tensor.shape) for tensor in index.tensors.values()),
        "num_tensors": len(index.tensors),
        "total_bytes": manifest.total_bytes,
        "files": {file.name: file.bytes for file in manifest.files},
        "tensors": {name: describe_tensor(tensor) for name, tensor in index.tensors.items()},
        "model_config": dict(manifest.model_config),
        "config": config_text(checkpoint),
        "tokenizer": manifest.tokenizer,
        "pawl_version": manifest.pawl_version,
        "torch_version": manifest.torch_version,
        "created_unix": manifest.created_unix,
        "xxh3": manifest.to_json()["xxh3"],
    }


def describe_tensor(tensor: SavedTensor) -> dict[str, Any]:
    """Shape, dtype of each state, bytes of all states together, and in how many boxes it was cut."""
    width = sum(ITEM_BYTES[dtype] for dtype in tensor.states.values())
    return {
        "shape": list(tensor.shape),
        "states": dict(tensor.states),
        "bytes": math.prod(tensor.shape) * width,
        "boxes": len(tensor.boxes),
    }


def table(facts: dict[str, Any], *, with_tensors: bool) -> str:
    """The facts as lines for a person."""
    mesh = " ".join(f"{axis}={size}" for axis, size in facts["mesh"].items())
    state, config = facts["state"], facts["config"]
    carried = "no config" if config is None else f"config of {len(config.splitlines()):,} lines (--config prints it)"
    lines = [
        f"{facts['path']}",
        f"  run {facts['run']}, step {facts['step']:,}, written by {facts['epoch']} on {mesh}",
        f"  {facts['num_parameters']:,} parameters in {facts['num_tensors']} tensors",
        f"  {facts['total_bytes']:,} bytes in {len(facts['files'])} files",
        f"  consumed: {state['consumed_samples']:,} samples, {state['consumed_tokens']:,} tokens",
        f"  {carried}; pawl {facts['pawl_version']}, torch {facts['torch_version']}",
        *(f"  {line}" for line in (tensor_lines(facts["tensors"]) if with_tensors else ())),
    ]
    return "\n".join(lines)


def tensor_lines(tensors: dict[str, dict[str, Any]]) -> list[str]:
    """A line per tensor; those of all layers that are alike share one: `model.layers.{0…31}.mlp.up_proj.weight`."""
    groups: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, tensor in tensors.items():
        shape = "×".join(map(str, tensor["shape"])) or "scalar"
        states = " ".join(f"{state}:{dtype}" for state, dtype in tensor["states"].items())
        groups.setdefault((_NUMBER.sub(".#.", name, count=1), shape, states), []).append((name, tensor["bytes"]))
    rows = [(_folded([name for name, _ in every]), shape, states, sum(size for _, size in every))
            for (_, shape, states), every in groups.items()]  # fmt: skip
    widths = [max(map(len, texts), default=0) for texts in zip(*(row[:3] for row in rows), strict=True)]
    return [
        f"{name:<{widths[0]}}  {shape:>{widths[1]}}  {states:<{widths[2]}}  {human_bytes(size):>9}"
        for name, shape, states, size in rows
    ]


def _folded(names: list[str]) -> str:
    """One name for tensors that differ in the number of their layer alone."""
    if len(names) == 1:
        return names[0]
    numbers = sorted(int(match[1]) for name in names if (match := _NUMBER.search(name)))
    gapless = numbers == list(range(numbers[0], numbers[-1] + 1))
    shown = f"{numbers[0]}…{numbers[-1]}" if gapless else ",".join(map(str, numbers))
    return _NUMBER.sub(f".{{{shown}}}.", names[0], count=1)


def human_bytes(count: float) -> str:
    """640 B · 16.0 MB (decimal, as disks are sold)"""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"
