"""`python -m trainer convert --checkpoint-path C --save-path OUT --target-format hf`, or the other way with `pawl`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from trainer.convert.export_hf import DTYPES, Exported, export_hf
from trainer.convert.hf_model import ConvertError
from trainer.convert.import_hf import Imported, import_hf
from trainer.convert.push import check_token, push
from trainer.convert.shards import MAX_SHARD_BYTES

Progress = Callable[[str, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `convert` on a parser."""
    parser.add_argument(
        "--checkpoint-path", type=Path, required=True, help="what is read: a checkpoint, or a Hugging Face folder"
    )
    parser.add_argument("--save-path", type=Path, required=True, help="the folder to make; it must not exist")
    parser.add_argument(
        "--target-format", choices=("hf", "pawl"), required=True, help="hf: a Hugging Face folder, pawl: a checkpoint"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of an export's weights (default: the run's compute dtype)"
    )
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json (default: the one the run names)")
    parser.add_argument("--push-to-hub", metavar="REPO", help="upload the export to this repository, with your token")
    parser.add_argument("--revision", metavar="BRANCH", help="the branch to upload to (default: main)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="largest weight file (default: 5 GB)"
    )


def main(args: argparse.Namespace) -> int:
    """Convert. Raises CheckpointInvalid or ConvertError."""
    token = None if args.push_to_hub is None else check_token()
    # Imported here: --help need not wait for it.
    from rich.console import Console
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    with Bar(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"→ {args.save_path}", total=None)
        done = _convert(args, lambda _, number, total: bar.update(task, completed=number, total=total))
    print(done)
    if token is not None:
        print(f"pushed to {push(args.save_path, args.push_to_hub, token=token, revision=args.revision)}")
    return 0


def _convert(args: argparse.Namespace, progress: Progress) -> str:
    if args.target_format == "hf":
        exported = export_hf(
            args.checkpoint_path,
            args.save_path,
            dtype=args.dtype,
            tokenizer=args.tokenizer,
            max_shard_bytes=args.max_shard_bytes,
            progress=progress,
        )
        return summary(exported)
    if any(option is not None for option in (args.dtype, args.tokenizer, args.push_to_hub)):
        raise ConvertError("--dtype, --tokenizer and --push-to-hub are of an export: an import keeps every bit.")
    imported = import_hf(args.checkpoint_path, args.save_path, max_shard_bytes=args.max_shard_bytes, progress=progress)
    return import_summary(imported)


def summary(done: Exported) -> str:
    """What was made, and what is missing from it."""
    tokenizer = "with tokenizer" if done.tokenizer is not None else "without tokenizer"
    line = f"{done.path}: step {done.step}, {done.num_parameters:,} parameters, {done.dtype}, {tokenizer}"
    return "\n".join([line, *(f"note: {note}" for note in done.notes)])


def import_summary(done: Imported) -> str:
    """What was made, and how a run starts from it."""
    tokenizer = "with tokenizer" if done.has_tokenizer else "without tokenizer"
    line = f"{done.path}: imported, {done.num_parameters:,} parameters, {done.dtype}, {tokenizer}"
    start = f"A run starts from it with the model section in {done.path / 'config.yaml'}."
    return "\n".join([line, *(f"note: {note}" for note in done.notes), start])
