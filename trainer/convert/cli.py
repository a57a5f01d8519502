"""`python -m trainer convert --checkpoint-path C --save-path OUT --target-format hf`."""

import argparse
from pathlib import Path

from trainer.convert.export_hf import DTYPES, MAX_SHARD_BYTES, Exported, export_hf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `convert` on a parser."""
    parser.add_argument("--checkpoint-path", type=Path, required=True, help="the folder of one checkpoint")
    parser.add_argument("--save-path", type=Path, required=True, help="the folder to make; it must not exist")
    parser.add_argument("--target-format", choices=("hf",), required=True, help="hf: a Hugging Face folder")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the weights (default: the run's compute dtype)")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (default: the one the run names)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="largest weight file (default: 5 GB)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the export. Raises CheckpointInvalid or ConvertError."""
    # Imported here: --help need not wait for it.
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"export → {args.save_path}", total=None)
        done = export_hf(
            args.checkpoint_path,
            args.save_path,
            dtype=args.dtype,
            tokenizer=args.tokenizer,
            max_shard_bytes=args.max_shard_bytes,
            progress=lambda _, number, total: bar.update(task, completed=number, total=total),
        )
    print(summary(done))
    return 0


def summary(done: Exported) -> str:
    """What was made, and what is missing from it."""
    tokenizer = "with tokenizer" if done.tokenizer is not None else "without tokenizer"
    line = f"{done.path}: step {done.step}, {done.num_parameters:,} parameters, {done.dtype}, {tokenizer}"
    return "\n".join([line, *(f"note: {note}" for note in done.notes)])
