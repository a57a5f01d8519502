"""`python -m trainer transfer push|pull|ls`: checkpoints to and from any place that fsspec opens. No torch.

Each verb may be run again: what has arrived is not sent a second time, and nothing counts before it is whole.
Exit codes: 0, 2 for arguments that do not fit, 89 for a checkpoint that is not whole, 92 for a place that fails.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.checkpoint.remote import Found, Place, Progress, Retry, find, open_place, pull, push
from trainer.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs of `transfer` on a parser."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    send = verbs.add_parser("push", help="copy a checkpoint folder to URL/<its name>")
    send.add_argument("checkpoint", type=Path, help="the folder of one checkpoint")
    send.add_argument("url", help="where copies lie: s3://bucket/run, gs://…, file:///…")
    send.set_defaults(transfer=_push)
    fetch = verbs.add_parser("pull", help="fetch a checkpoint into a folder, verified")
    fetch.add_argument("url", help="where copies lie")
    fetch.add_argument("checkpoints", type=Path, help="the folder that gets it, such as runs/demo/checkpoints")
    fetch.add_argument("--name", help="which one (default: the newest that is complete)")
    fetch.set_defaults(transfer=_pull)
    look = verbs.add_parser("ls", help="what lies there, newest first")
    look.add_argument("url", help="where copies lie")
    look.set_defaults(transfer=_ls)
    for verb in (send, fetch, look):
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.add_argument("--tries", type=int, default=5, help="how often each file is tried (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Run one verb. Raises TransferFailed, CheckpointInvalid, UsageError."""
    if args.tries < 1:
        raise UsageError(f"--tries is {args.tries}; 1 is the least.")
    code: int = args.transfer(args, open_place(args.url), Retry(tries=args.tries))
    return code


def _push(args: argparse.Namespace, place: Place, retry: Retry) -> int:
    with _bar(f"{args.checkpoint.name} → {args.url}") as progress:
        manifest, sent = push(args.checkpoint, place, retry=retry, progress=progress)
    facts = {"name": args.checkpoint.name, "url": args.url, "bytes": manifest.total_bytes, "sent_bytes": sent}
    was = "was there already" if sent == 0 else f"{sent:,} bytes sent"
    print(json.dumps(facts) if args.json else f"{place.shown(args.checkpoint.name)}: step {manifest.step}, {was}")
    return 0


def _pull(args: argparse.Namespace, place: Place, retry: Retry) -> int:
    name = args.name
    if name is None:
        name = next((found.name for found in find(place, retry=retry) if found.defect is None), None)
    if name is None:
        raise UsageError(f"{args.url} holds no complete checkpoint; `transfer ls` shows what is there.")
    with _bar(f"{args.url} → {name}") as progress:
        path = pull(place, name, args.checkpoints, retry=retry, progress=progress)
    print(json.dumps({"name": name, "path": str(path)}) if args.json else f"{path}: fetched and verified")
    return 0


def _ls(args: argparse.Namespace, place: Place, retry: Retry) -> int:
    found = find(place, retry=retry)
    if args.json:
        keys = ("name", "step", "num_bytes", "defect")
        print(json.dumps({"url": args.url, "checkpoints": [{key: getattr(f, key) for key in keys} for f in found]}))
    else:
        print("\n".join(_line(each) for each in found) or f"{args.url}: no checkpoint")
    return 0


def _line(found: Found) -> str:
    if found.defect is not None:
        return f"{found.name}  not complete: {found.defect}"
    return f"{found.name}  step {found.step}  {found.num_bytes:,} bytes"


@contextmanager
def _bar(title: str) -> Iterator[Progress | None]:
    """A bar with rate and time to go for a person; nothing where nobody looks."""
    # Imported here: --help need not wait for it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda _, done, total: bar.update(task, completed=done, total=total)
