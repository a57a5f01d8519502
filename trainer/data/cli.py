"""`python -m trainer data …`: prepare token folders, look into one, train a tokenizer.

data prepare --input PATH… --tokenizer DIR --out DIR [--holdout-every N --holdout-out DIR]
data inspect DIR [--verify] [--json]
data tokenizer train --input PATH… --vocab-size N --out DIR

Exit codes: 0, 2 for arguments that do not fit, 88 for data that cannot be read as described, 130 after Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.data.documents import expand_inputs, read_documents
from trainer.data.format import Metadata, TokenSource, verify
from trainer.data.prepare import Progress, Request, prepare
from trainer.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from trainer.errors import DataError, Interrupted, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs of `data` on a parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _prepare_arguments(
        _verb(
            verbs,
            "prepare",
            help="texts and a tokenizer into a token folder",
            examples=(
                "--input texts/ --tokenizer tokenizer --out data/texts",
                "--input '*.jsonl' --tokenizer tokenizer --out data/books --holdout-every 200 --holdout-out data/held",
            ),
        )
    )
    inspect = _verb(
        verbs,
        "inspect",
        help="what a token folder holds, and whether it is whole",
        examples=("data/texts", "data/texts --verify"),
    )
    inspect.add_argument("folder", type=Path)
    inspect.add_argument("--verify", action="store_true", help="read everything: digests, document ends, ids")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(data_verb=_inspect, interrupted="interrupted.")
    train_example = "--input texts/ --vocab-size 1024 --out tokenizer"
    tokenizer = _verb(verbs, "tokenizer", help="make a tokenizer", examples=(f"train {train_example}",))
    train = _verb(
        tokenizer.add_subparsers(dest="tokenizer_verb", required=True, metavar="VERB"),
        "train",
        help="train a byte-level BPE",
        examples=(train_example,),
    )
    _input_arguments(train)
    train.add_argument("--vocab-size", type=int, required=True, help="entries, end-of-document token included")
    train.add_argument("--out", type=Path, required=True, help="a new folder; transformers loads it")
    train.set_defaults(data_verb=_train_tokenizer, interrupted="interrupted; nothing was written.")


def _verb(verbs: Any, name: str, *, help: str, examples: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser of a verb; its examples begin with the name that the program was called by."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=help,
        description=help,
        epilog="examples:\n" + "\n".join(f"  %(prog)s {example}" for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _input_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or patterns")
    parser.add_argument("--text-column", default="text", help="field or column that holds the text (default: text)")


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _input_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json, or that file")
    parser.add_argument("--eos-token", help="token that ends a document (default: what the tokenizer folder says)")
    parser.add_argument("--out", type=Path, required=True, help="the token folder to make")
    parser.add_argument(
        "--shard-tokens", type=int, default=1 << 27, help="tokens after which a shard ends (default: 2^27)"
    )
    parser.add_argument("--holdout-every", type=int, metavar="N", help="hold every N-th document out")
    parser.add_argument("--holdout-out", type=Path, metavar="DIR", help="the token folder of held-out documents")
    parser.set_defaults(data_verb=_prepare, interrupted="interrupted; the same command goes on where it stopped.")


def main(args: argparse.Namespace) -> int:
    """Run the parsed verb; 0, or 88 where `inspect` found problems. Raises DataError, UsageError, Interrupted."""
    try:
        return int(args.data_verb(args))
    except KeyboardInterrupt:
        raise Interrupted(args.interrupted) from None
    except OSError as error:
        raise DataError(f"{error.filename or 'A file'}: {error.strerror or error}.") from error


def _prepare(args: argparse.Namespace) -> int:
    if (args.holdout_every is None) != (args.holdout_out is None):
        raise UsageError("--holdout-every and --holdout-out belong together; give both or neither.")
    if args.holdout_every is not None and args.holdout_every < 2:
        raise UsageError(f"--holdout-every {args.holdout_every}: 2 or more, or nothing would be left to train on.")
    if args.shard_tokens < 1:
        raise UsageError(f"--shard-tokens {args.shard_tokens}: a shard needs at least one token.")
    request = Request(
        inputs=tuple(args.input),
        text_column=args.text_column,
        shard_tokens=args.shard_tokens,
        out=args.out,
        holdout_every=args.holdout_every,
        holdout_out=args.holdout_out,
    )
    tokenizer = load_tokenizer(args.tokenizer, eos_token=args.eos_token)
    with Bar(f"tokenize → {args.out}") as bar:
        made = prepare(request, tokenizer, bar)
    for folder, metadata in zip((args.out, args.holdout_out), made, strict=False):
        print(f"{folder}: {_summary(metadata)}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    if not args.folder.is_dir():
        raise UsageError(f"{args.folder}: there is no such folder on this machine.")
    source = TokenSource(args.folder)
    found = verify(source) if args.verify else None
    if args.json:
        print(json.dumps({**source.metadata.to_json(), "problems": None if found is None else list(found)}, indent=2))
    else:
        print(f"{args.folder}: {_summary(source.metadata)}")
        print(
            f"  ids: {source.metadata.dtype}, vocabulary {source.metadata.vocab_size:,}, eos {source.metadata.eos_id}"
        )
        print(
            f"  tokenizer: {source.metadata.tokenizer.get('path')} (sha256 {source.metadata.tokenizer.get('sha256')})"
        )
        print("  not verified (--verify reads everything)" if found is None else "  verified" if not found else "")
    for problem in found or ():
        print(f"error: {problem}", file=sys.stderr)
    return DataError.exit_code if found else 0


def _summary(metadata: Metadata) -> str:
    shards = len(metadata.shards)
    return f"{metadata.num_tokens:,} tokens in {metadata.num_documents:,} documents, {shards} shard{'s'[: shards != 1]}"


def _train_tokenizer(args: argparse.Namespace) -> int:
    files = expand_inputs(args.input)
    if args.out.exists():
        raise UsageError(f"--out {args.out} exists. Remove it or choose another place; nothing is overwritten.")
    with Bar(f"tokenizer → {args.out}") as bar:
        backend = train_bpe(_texts(files, args.text_column, bar), vocab_size=args.vocab_size)
    save_tokenizer(backend, args.out)
    print(f"{args.out}: byte-level BPE of {args.vocab_size:,} entries")
    return 0


def _texts(files: tuple[Path, ...], column: str, bar: "Bar") -> Iterator[str]:
    total, before = sum(file.stat().st_size for file in files), 0
    for file in files:
        for count, document in enumerate(read_documents(file, column=column)):
            yield document.text
            if count % 256 == 0:
                bar.show(before + document.done * file.stat().st_size, total, note=file.name)
        before += file.stat().st_size
    bar.show(total, total, note="merging pairs")


class Bar(Progress):
    """A progress bar with the time left, on standard error; silent where that is no terminal."""

    def __init__(self, title: str) -> None:
        # Imported here: half of a second that --help and errors in arguments need not pay.
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = ("[progress.description]{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._rich = RichProgress(
            *columns, TextColumn("{task.fields[note]}"), console=console, disable=not console.is_terminal
        )
        self._task = self._rich.add_task(title, total=None, note="")

    def advance(self, *, done_bytes: float, total_bytes: int, documents: int, tokens: int) -> None:
        self.show(done_bytes, total_bytes, note=f"{documents:,} documents, {tokens:,} tokens")

    def show(self, done: float, total: float, *, note: str) -> None:
        self._rich.update(self._task, completed=done, total=total, note=note)

    def __enter__(self) -> "Bar":
        self._rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._rich.stop()
