"""Saving, against a plain copy and `dd`.

One rank, 192 MiB of state (fp32 weights and two moments). All files lie on one file system, below build/.
"""

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ops.bench.models import bench_config, engine_of
from ops.bench.rows import ROOT, Row, in_pairs, spread_of

if TYPE_CHECKING:
    from trainer.checkpoint.contents import RankContents
    from trainer.checkpoint.shards import RankShards
    from trainer.engine import Engine

SHAPE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 3, "vocab_size": 8192}


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder that goes away."""
    (ROOT / "build").mkdir(exist_ok=True)
    path = Path(tempfile.mkdtemp(dir=ROOT / "build", prefix="bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def make_engine() -> "Engine":
    import torch

    torch.set_num_threads(1)
    return engine_of(bench_config(shape=SHAPE))


def state_of(engine: "Engine") -> tuple["RankShards", "RankContents"]:
    """What the rank stores, and the plan of its file with a snapshot's buffer."""
    from trainer.checkpoint.contents import RankContents
    from trainer.checkpoint.shards import shards_of

    shards = shards_of(engine)
    return shards, RankContents(shards, keeps_snapshot=True)


def row(name: str, what: str, times: list[tuple[float, float]], num_bytes: int, *, is_speed: bool) -> Row:
    """Times of pairs as a ratio of times, or of speeds (then ours and other are MiB/s)."""
    ratios = [theirs / mine if is_speed else mine / theirs for mine, theirs in times]
    mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    size = num_bytes / (1 << 20)
    ours, other = (size / mine, size / theirs) if is_speed else (mine, theirs)
    return Row(
        id=name, what=what, ours=ours, other=other, ratio=statistics.median(ratios), spread=spread_of(ratios),
        threads=1, shape=f"{size:.0f} MiB of state, one rank, fp32",
    )  # fmt: skip


def blocking_row(pairs: int) -> Row:
    """Seconds that a snapshot keeps training, against a plain copy of the same bytes into memory that is there."""
    import torch

    shards, contents = state_of(make_engine())
    numel = contents.snapshot_bytes // 4
    source, target = torch.ones(numel), torch.ones(numel)
    times = in_pairs(lambda: contents.snapshot(shards), lambda: target.copy_(source), pairs)
    what = "seconds of the blocking part of a save beside training, of a plain copy of the same bytes"
    return row("ckpt-blocking-vs-copy", what, times, contents.snapshot_bytes, is_speed=False)


def write_row(pairs: int) -> Row:
    """MiB/s of the background's write (digest, sync, read-back), against dd of as many bytes with conv=fsync."""
    from trainer.checkpoint.save import write_contents

    shards, contents = state_of(make_engine())
    snapshot, size = contents.snapshot(shards), contents.snapshot_bytes
    with folder() as path:
        dd = ["dd", "if=/dev/zero", f"of={path / 'dd'}", "bs=4M", f"count={size >> 22}", "conv=fsync"]

        def ours() -> None:
            (path / snapshot.file).unlink(missing_ok=True)
            write_contents(path, snapshot)

        def other() -> None:
            (path / "dd").unlink(missing_ok=True)
            subprocess.run(dd, check=True, capture_output=True)

        times = in_pairs(ours, other, pairs)
    return row("ckpt-write-vs-dd", "MiB/s written, digested, synced and read back, of dd conv=fsync", times, size,
               is_speed=True)  # fmt: skip


def rows(pairs: int) -> dict[str, Callable[[], Row]]:
    """All rows by id."""
    return {"ckpt-blocking-vs-copy": lambda: blocking_row(pairs), "ckpt-write-vs-dd": lambda: write_row(pairs)}
