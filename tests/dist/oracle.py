"""`make oracle`: every mesh of at most 8 ranks with every schedule, options by a covering array; then the table of what
must not change a bit. Writes a line per finished case, goes on where it stopped, and sums up in one JSON file.

    PYTHONPATH=tests python -m dist.oracle                       all (about 450 cases)
    PYTHONPATH=tests python -m dist.oracle --shard 2/4           a quarter of them, on one of four machines
    PYTHONPATH=tests python -m dist.oracle --case dp=2,pp=2,tp=1,tied=False
    PYTHONPATH=tests python -m dist.oracle --case dp=2,pp=2,tp=1~one-stage

build/oracle.jsonl   {case, max_rel_err, faults, seconds, code}: a line counts only for the code it was made with
build/oracle.json    {cases, failures, max_rel_err, seconds}: max_rel_err over the cases in fp64
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dist.axes import MAX_RANKS, Case
from dist.bits import Player, Twins, parse_twins, twins_of
from dist.case import FULL_STEPS
from dist.choice import full_cases, one_of_each_mesh
from dist.pool import Pool, RankError
from dist.verdict import judge

ROOT = Path(__file__).parents[2]
Item = Case | Twins
# On a busy machine a case may take long; one that hangs is told by gloo's own limit much earlier.
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One finished case. `max_rel_err` is None where bits were compared or nothing came back."""

    case: str
    max_rel_err: float | None
    faults: tuple[str, ...]
    seconds: float
    code: str


def items() -> tuple[Item, ...]:
    """Everything, in a fixed order."""
    return (*full_cases(), *twins_of(one_of_each_mesh()))


def parse_item(text: str) -> Item:
    """A case or twins from their name. Raises ValueError."""
    return parse_twins(text) if "~" in text else Case.parse(text)


def fingerprint(root: Path) -> str:
    """Digest of the code that a verdict depends on."""
    files = sorted([*(root / "trainer").rglob("*.py"), *(root / "tests" / "dist").glob("*.py")])
    digest = hashlib.sha256()
    for path in [*files, root / "tests" / "reference.py"]:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read_lines(path: Path, code: str) -> dict[str, Line]:
    """Finished cases of this code by name; a line cut off in the middle is passed over."""
    found: dict[str, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = Line(**json.loads(text))
        except (ValueError, TypeError):
            print(f"{path}: passed over a line that is cut off: {text[:60]!r}", file=sys.stderr)
            continue
        if line.code == code:
            found[line.case] = line
    return found


def summary(lines: Iterable[Line]) -> dict[str, int | float]:
    """What build/oracle.json holds."""
    lines = list(lines)
    exact = [line.max_rel_err for line in lines if line.max_rel_err is not None and "dtype=" not in line.case]
    return {
        "cases": len(lines),
        "failures": sum(bool(line.faults) for line in lines),
        "max_rel_err": max(exact, default=0.0),
        "seconds": round(sum(line.seconds for line in lines), 1),
    }


def shard_of(all_items: Sequence[Item], shard: str) -> list[Item]:
    """Part i of n, `i/n` counted from 1. Raises ValueError."""
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard {shard}: write it as 2/4, the second of four parts")
    return list(all_items[int(index) - 1 :: int(count)])


def run_item(pool: Pool, player: Player, item: Item, code: str) -> Line:
    """One case; what a rank raises is a fault of the case."""
    start = time.monotonic()
    error: float | None = None
    try:
        if isinstance(item, Twins):
            faults = player.faults(item)
        else:
            verdict = judge(pool, item, FULL_STEPS)
            error, faults = verdict.max_rel_err, verdict.faults
    except RankError as raised:
        faults = (str(raised),)
    return Line(case=str(item), max_rel_err=error, faults=faults, seconds=time.monotonic() - start, code=code)


def repeat_command(line: Line) -> str:
    """The command that runs just this case."""
    return f"PYTHONPATH=tests .venv/bin/python -m dist.oracle --case {line.case!r}"


def run_all(todo: Sequence[Item], path: Path, code: str, say: Callable[[str], None]) -> None:
    """Run each case that has no line yet; every line is on disk before the next case starts."""
    known = read_lines(path, code)
    left = [item for item in todo if str(item) not in known]
    if len(left) < len(todo):
        say(f"{len(todo) - len(left)} of {len(todo)} cases stand in {path} already")
    pool = Pool(MAX_RANKS, timeout_s=LIMIT_S)
    player, start = Player(pool), time.monotonic()
    try:
        with path.open("a") as file:
            for place, item in enumerate(left, 1):
                line = run_item(pool, player, item, code)
                file.write(json.dumps(asdict(line)) + "\n")
                file.flush()
                eta = (time.monotonic() - start) / place * (len(left) - place)
                say(_progress(line, f"{place}/{len(left)}", eta))
    finally:
        pool.close()


def _progress(line: Line, place: str, eta_s: float) -> str:
    mark = "FAIL" if line.faults else "ok"
    error = "bits" if line.max_rel_err is None else f"{line.max_rel_err:.1e}"
    text = f"{place:>9} {mark:4} {error:>7} {line.seconds:5.1f} s  {line.case}  (left: {eta_s / 60:.0f} min)"
    return "\n".join([text, *(f"          {fault}" for fault in line.faults), *_repeat(line)])


def _repeat(line: Line) -> list[str]:
    return [f"          again: {repeat_command(line)}"] if line.faults else []


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a case failed; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m dist.oracle", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="run part I of N, counted from 1")
    parser.add_argument("--case", action="append", default=[], metavar="CASE", help="run just this case; repeatable")
    parser.add_argument("--build", type=Path, default=ROOT / "build", metavar="DIR", help="where the results go")
    args = parser.parse_args(argv)
    try:
        todo = [parse_item(text) for text in args.case] or shard_of(items(), args.shard)
    except ValueError as error:
        parser.error(str(error))
    args.build.mkdir(parents=True, exist_ok=True)
    path, code = args.build / "oracle.jsonl", fingerprint(ROOT)
    names = {str(item) for item in todo}
    if args.case:  # asked for by name: run again whatever is known
        code += f"-{time.time_ns()}"
    try:
        run_all(todo, path, code, say=lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command goes on after the cases in {path}")
        return 130
    result = summary(line for name, line in read_lines(path, code).items() if name in names)
    if not args.case:
        (args.build / "oracle.json").write_text(json.dumps(result) + "\n")
    print(json.dumps(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
