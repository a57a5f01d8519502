"""`python -m trainer duplicate CHECKPOINT --to DIR`: a checkpoint once more, as the start of another run. No torch.

Files are hard links where the file system allows it and they are ours, so it costs no space, and either side may delete
its own; else they are copied. With --run the new one belongs to that run: its manifest names the run and the epoch of
no launch, under which a checkpoint counts in a run that has not started yet. All is read and verified before the last
rename; a kill before that leaves a `.partial` folder.
"""

import argparse
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.match import misfit
from trainer.checkpoint.naming import MANIFEST, CheckpointName, parse_epoch, partial_name
from trainer.checkpoint.reader import Checkpoint, check_file, open_checkpoint
from trainer.checkpoint.verify import problems
from trainer.config import load_config
from trainer.errors import ConfigError, UsageError
from trainer.fsio import fsync_directory, write_atomic
from trainer.memory import topology_of
from trainer.records import UNSUPERVISED
from trainer.spec import param_specs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `duplicate` on a parser."""
    parser.add_argument("checkpoint", type=Path, help="the folder of one checkpoint")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder that will hold it")
    parser.add_argument("--run", metavar="NAME", help="the run it will belong to [it stays what it is: a base]")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the config whose model it must fit")
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Duplicate, verify, say what was made. Raises CheckpointInvalid, ConfigError, UsageError."""
    checkpoint = open_checkpoint(args.checkpoint)
    if args.config is not None:
        check_fit(checkpoint, args.config)
    made = duplicate(checkpoint, args.to, run=args.run)
    if args.json:
        print(json.dumps(made, indent=2))
    else:
        how = f"{made['linked']} files linked, {made['copied']} copied"
        print(f"{made['path']}: step {made['step']:,}, {made['bytes']:,} bytes, {how}, verified")
    return 0


def check_fit(checkpoint: Checkpoint, config_file: Path) -> None:
    """Raises ConfigError unless the checkpoint holds the tensors of the config's model."""
    config = load_config(config_file)
    different = misfit(checkpoint, param_specs(config, topology_of(config)))
    if different is not None:
        raise ConfigError(
            f"The checkpoint {checkpoint.path} is not of the model this config describes: {different}. Shapes cannot "
            "change on the way; leave the model section as it is, or start a run of its own."
        )


def duplicate(checkpoint: Checkpoint, folder: Path, *, run: str | None) -> dict[str, Any]:
    """Make it in `folder`; nothing is left of a failure. Raises UsageError (name taken, disk), CheckpointInvalid."""
    manifest, name = checkpoint.manifest, checkpoint.path.resolve().name
    digest = manifest.to_json()["xxh3"]
    partial = folder / f".{name}.partial"
    if run is not None:
        target = CheckpointName(manifest.step, parse_epoch(UNSUPERVISED.text))
        name, partial = str(target), folder / partial_name(target)
        manifest = replace(manifest, run=run, epoch=UNSUPERVISED.text)
    final = folder / name
    for taken in (final, partial):
        if os.path.lexists(taken):
            raise UsageError(f"{taken} exists already. Nothing is overwritten: move it away, or give another --to.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        linked = sum(place(checkpoint.path / file.name, partial / file.name) for file in manifest.files)
        write_atomic(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2))
        verify(partial, checkpoint)
        fsync_directory(partial)
        partial.rename(final)
        fsync_directory(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UsageError(f"{final} could not be made: {error.strerror or error}. Nothing was left behind.") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {
        "name": name,
        "path": str(final),
        "run": manifest.run,
        "step": manifest.step,
        "bytes": manifest.total_bytes,
        "digest": digest,
        "linked": linked,
        "copied": len(manifest.files) - linked,
    }


def verify(folder: Path, source: Checkpoint) -> None:
    """Read every byte. Raises CheckpointInvalid naming the first damaged file: the source's, where that is damaged."""
    print(f"verifying {source.manifest.total_bytes:,} bytes …", file=sys.stderr, flush=True)
    bad = problems(folder)
    if not bad:
        return
    record = source.manifest.file(bad[0].bad_file.name) if bad[0].bad_file is not None else None
    if record is not None:
        check_file(source.path, record)
    raise bad[0]


def place(source: Path, target: Path) -> bool:
    """Put one file there: True as a link, False as a copy. Somebody else's file is copied: its owner may change it."""
    if source.stat().st_uid == os.geteuid() and is_linked(source, target):
        return True
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
    return False


def is_linked(source: Path, target: Path) -> bool:
    """Try to link; False where that cannot be: another file system, or one without links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        return False
    return True
