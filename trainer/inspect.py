"""`python -m trainer inspect CHECKPOINT`: what a checkpoint holds, and with --verify whether it is whole. No torch."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from trainer.checkpoint.reader import Checkpoint, open_checkpoint
from trainer.checkpoint.verify import problems
from trainer.errors import CheckpointInvalid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `inspect` on a parser."""
    parser.add_argument("checkpoint", type=Path, help="the folder of one checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every file and compare sizes and digests")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Print the contents; 89 if the checkpoint is not whole. Raises CheckpointInvalid if its tables do not read."""
    checkpoint = open_checkpoint(args.checkpoint)
    found = problems(args.checkpoint) if args.verify else None
    facts = describe(checkpoint)
    if args.json:
        bad = None if found is None else [{"file": str(error.bad_file), "message": str(error)} for error in found]
        print(json.dumps({**facts, "problems": bad}, indent=2))
    else:
        print(table(facts))
        print("not verified (--verify reads everything)" if found is None else "damaged" if found else "verified")
    for error in found or ():
        print(f"error: {error}", file=sys.stderr)
    return CheckpointInvalid.exit_code if found else 0


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
        "tensors": {name: list(tensor.shape) for name, tensor in index.tensors.items()},
        "tokenizer": manifest.tokenizer,
        "pawl_version": manifest.pawl_version,
        "torch_version": manifest.torch_version,
    }


def table(facts: dict[str, Any]) -> str:
    """The facts as lines for a person."""
    mesh = " ".join(f"{axis}={size}" for axis, size in facts["mesh"].items())
    state = facts["state"]
    lines = [
        f"{facts['path']}",
        f"  run {facts['run']}, step {facts['step']:,}, written by {facts['epoch']} on {mesh}",
        f"  {facts['num_parameters']:,} parameters in {facts['num_tensors']} tensors",
        f"  {facts['total_bytes']:,} bytes in {len(facts['files'])} files",
        f"  consumed: {state['consumed_samples']:,} samples, {state['consumed_tokens']:,} tokens",
    ]
    return "\n".join(lines)
