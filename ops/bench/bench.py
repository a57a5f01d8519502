"""`make bench`: rows measured in one run, written to build/bench.json. Most are ratios against other code.

fp32, 1 thread a process. `rows.py` says what a row is and how times are compared; each topic has a module.

    python -m ops.bench.bench [--out build/bench.json] [--pairs 7] [--only ROW]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from ops.bench import checkpoint, cross_entropy, memory
from ops.bench.commands import command_row
from ops.bench.loop import loop_row
from ops.bench.overlap import overlap_row
from ops.bench.pipeline import bubble_row
from ops.bench.rows import ROOT, SPREAD_LIMIT, Row
from ops.bench.single import single_vs_plain


def rows(pairs: int) -> dict[str, Callable[[], Row]]:
    """Every row by its id, in the order in which they are measured."""
    pawl = [sys.executable, "-m", "orchestrator"]
    return {
        "single-vs-plain": lambda: single_vs_plain(pairs),
        "loop-overhead": loop_row,
        "memory-vs-predicted": memory.memory_row,
        "ce-32k-memory-vs-plain": cross_entropy.memory_row,
        "ce-32k-time-vs-plain": lambda: cross_entropy.time_row(pairs),
        "bubble-pp2-m8": lambda: bubble_row(pairs),
        "overlap-dp2": lambda: overlap_row(pairs),
        **checkpoint.rows(pairs),
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
    done: list[Row] = []
    for name in [args.only] if args.only else table:
        start = time.perf_counter()
        row = table[name]()
        took = time.perf_counter() - start
        done.append(row)
        warning = f"  SPREAD over {SPREAD_LIMIT:.0%}: do not trust" if row.spread > SPREAD_LIMIT else ""
        figures = f"{row.ours:10.3f} / {row.other:10.3f} = {row.ratio:6.3f}  spread {row.spread:4.0%}"
        print(f"{row.id:<23} {figures}  ({took:.0f} s){warning}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"rows": [asdict(row) for row in done]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
