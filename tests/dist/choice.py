"""Which cases are run: a covering array for `make test`, and every mesh with every schedule for `make oracle`.

    PYTHONPATH=tests python -m dist.choice      writes both lists anew, after a change of AXES (takes minutes)

They stand in files, because finding few cases takes longer than running some; a test holds the files to cover what they
must.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dist.axes import AXES, MAX_RANKS, Case, config_of, is_legal, is_telling
from dist.covering import Row, cover

QUICK, FULL = (Path(__file__).with_name(name) for name in ("cases_quick.txt", "cases_full.txt"))
EXACT = "float64"
QUICK_SIZES = (1, 2, 4)
MAX_COMPILED = 2  # ranks of a case that compiles: each of them takes a minute of a core
# The smallest mesh of each kind; each axis at its full size; sizes that are no power of two, and rare values.
FIXED = (
    Case.of(),
    Case.of(dp=2),
    Case.of(pp=2),
    Case.of(tp=2),
    Case.of(dp=8, kv="one", objective="z", bucket=100),
    Case.of(pp=8, schedule="afab", layers=8, clip=1000.0),
    Case.of(tp=8, sp=True, objective="smooth", tied=False),
    Case.of(pp=4, schedule="interleaved", virtual=2, layers=8, split="01211111", recompute="full/3"),
    Case.of(dp=3, pp=2, schedule="interleaved", virtual=3, layers=8, zero=0),
    Case.of(pp=2, tp=3, split="31", family="qwen2", tied=False, vocab=509),
    Case.of(tp=2, schedule="zb-v", sp=True, recompute="selective", compile=True, bias=True, masks=True),
)


@cache
def quick_cases() -> tuple[Case, ...]:
    """At most 38: in fp64 FIXED and all pairs of values; some in bf16, in which most values occur; one in fp32."""
    return _read(QUICK)


@cache
def full_cases() -> tuple[Case, ...]:
    """In fp64 every legal mesh with every schedule and every value of every option; in bf16 every mesh; quick cases."""
    return _read(FULL)


def _read(path: Path) -> tuple[Case, ...]:
    return tuple(Case.parse(line) for line in path.read_text().splitlines())


def find_quick_cases() -> list[Case]:
    """What the first file should hold. Raises ValueError for a FIXED case that is not legal."""
    for case in FIXED:
        config_of(case)
    axes = quick_axes()
    start = [{name: case[name] for name in axes} for case in FIXED]
    pairs = [
        Case.of(**row)
        for row in cover(axes, lambda row: is_telling(Case.of(**row)), start=start, candidates=60)
    ]  # fmt: skip
    rough = [case.but(dtype="bfloat16") for case in _most_values(pairs[len(FIXED) :], number=3)]
    return [*pairs, *rough, rough[-1].but(dtype="float32")]


def quick_axes() -> dict[str, tuple[Any, ...]]:
    """The sizes of the mesh and all options but the dtype."""
    options = {axis.name: axis.values for axis in AXES if axis.name != "dtype"}
    return {"dp": QUICK_SIZES, "pp": QUICK_SIZES, "tp": QUICK_SIZES, **options}


def _most_values(cases: Sequence[Case], *, number: int) -> list[Case]:
    """`number` of the cases, greedily, in which the most values of options occur."""
    chosen: list[Case] = []
    seen: set[tuple[str, Any]] = set()
    for _ in range(number):
        chosen.append(max(cases, key=lambda case: len(_values(case) - seen)))
        seen |= _values(chosen[-1])
    return chosen


def _values(case: Case) -> set[tuple[str, Any]]:
    return {(axis.name, case[axis.name]) for axis in AXES}


def find_full_cases(quick: Sequence[Case]) -> list[Case]:
    """What the second file should hold."""
    pairs = [_on_mesh(row) for row in cover(full_axes(), lambda row: _is_worth_its_time(_on_mesh(row)), candidates=2)]
    rough = [case.but(dtype="bfloat16") for case in _last_of_each_mesh(pairs)]
    return list(dict.fromkeys((*pairs, *rough, *quick)))


def _is_worth_its_time(case: Case) -> bool:
    """Legal; 16 layers only where fewer would not do, compiled on few ranks."""
    if case["compile"] and case.topology.world_size > MAX_COMPILED:
        return False
    return is_legal(case) and (case["layers"] < 16 or not is_legal(case.but(layers=8)))


def one_of_each_mesh() -> tuple[Case, ...]:
    """Of the full cases in fp64, one on each mesh; an eager one: compiled code is equal to rounding."""
    return tuple(_last_of_each_mesh(c for c in full_cases() if c["dtype"] == EXACT and not c["compile"]))


def _last_of_each_mesh(cases: Iterable[Case]) -> list[Case]:
    return list({(case.dp, case.pp, case.tp): case for case in cases}.values())


def full_axes() -> dict[str, tuple[Any, ...]]:
    """The mesh as one axis of (dp, pp, tp), and all options but the dtype."""
    sizes = range(1, MAX_RANKS + 1)
    meshes = tuple((d, p, t) for d in sizes for p in sizes for t in sizes if d * p * t <= MAX_RANKS)
    return {"mesh": meshes, **{axis.name: axis.all_values for axis in AXES if axis.name != "dtype"}}


def _on_mesh(row: Row) -> Case:
    dp, pp, tp = row["mesh"]
    return Case.of(dp=dp, pp=pp, tp=tp, **{name: value for name, value in row.items() if name != "mesh"})


if __name__ == "__main__":
    quick = find_quick_cases()
    for path, cases in ((QUICK, quick), (FULL, find_full_cases(quick))):
        path.write_text("".join(f"{case}\n" for case in cases))
        print(f"{len(cases)} cases in {path}", flush=True)
