"""The long oracle's bookkeeping: parts, resuming, what a failure prints. No rank is started."""

import json
from pathlib import Path

import pytest
from dist import oracle
from dist.axes import Case, is_legal
from dist.bits import RELATIONS, Twins
from dist.oracle import Line, items, parse_item, read_lines, run_all, shard_of, summary

CASES = [Case.of(), Case.of(dp=2), Case.of(pp=2), Case.of(tp=2), Case.of(dp=2, dtype="bfloat16")]


def line(case: Case, *, code: str = "now", error: float | None = 1e-13, faults: tuple[str, ...] = ()) -> Line:
    return Line(case=str(case), max_rel_err=error, faults=faults, seconds=1.5, code=code)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Cases that would have been run; the third fails, the fourth is interrupted once."""
    seen: list[Case] = []

    def run_item(pool: object, player: object, item: Case, code: str) -> Line:
        seen.append(item)
        if item == CASES[3] and seen.count(item) == 1:
            raise KeyboardInterrupt
        return line(item, code=code, faults=("loss: relative error 1",) if item == CASES[2] else ())

    monkeypatch.setattr(oracle, "run_item", run_item)
    return seen


def test_an_interrupted_oracle_goes_on_where_it_stopped(tmp_path: Path, ran: list[Case]) -> None:
    path, said = tmp_path / "oracle.jsonl", list[str]()
    with pytest.raises(KeyboardInterrupt):
        run_all(CASES, path, "now", said.append)
    assert list(read_lines(path, "now")) == [str(case) for case in CASES[:3]]
    run_all(CASES, path, "now", said.append)
    assert ran == [*CASES[:4], *CASES[3:]] and "3 of 5 cases" in "\n".join(said)
    run_all(CASES, path, "another code", said.append)
    assert ran[6:] == CASES, "lines of other code do not count"


def test_a_failing_case_is_told_with_the_command_that_repeats_it(
    tmp_path: Path, ran: list[Case], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "items", lambda: CASES[:3])
    assert oracle.main(["--build", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "loss: relative error 1" in out
    assert f"python -m dist.oracle --case '{CASES[2]}'" in out and str(parse_item(str(CASES[2]))) == str(CASES[2])
    assert json.loads((tmp_path / "oracle.json").read_text()) == {
        "cases": 3, "failures": 1, "max_rel_err": 1e-13, "seconds": 4.5,
    }  # fmt: skip


def test_ctrl_c_is_130_and_one_line(
    tmp_path: Path, ran: list[Case], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "items", lambda: CASES)
    assert oracle.main(["--build", str(tmp_path)]) == 130
    assert "stopped; the same command goes on" in capsys.readouterr().out and not (tmp_path / "oracle.json").exists()


def test_parts_are_disjoint_and_make_the_whole() -> None:
    parts = [shard_of(CASES, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(str(case) for part in parts for case in part) == sorted(map(str, CASES))
    for wrong in ("0/3", "4/3", "a/b", "3", "-1/3", "1/"):
        with pytest.raises(ValueError, match="2/4"):
            shard_of(CASES, wrong)


def test_the_largest_error_is_that_of_the_exact_cases() -> None:
    lines = [line(CASES[0], error=3e-12), line(CASES[4], error=0.1), line(CASES[1], error=None, faults=("died",))]
    assert summary(lines) == {"cases": 3, "failures": 1, "max_rel_err": 3e-12, "seconds": 4.5}


def test_a_line_cut_off_in_the_middle_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "oracle.jsonl"
    whole = json.dumps({"case": "dp=1", "max_rel_err": None, "faults": [], "seconds": 1.0, "code": "now"})
    path.write_text(f"{whole}\n{whole[:20]}")
    assert list(read_lines(path, "now")) == ["dp=1"]


def test_both_sides_of_every_relation_are_legal() -> None:
    pairs = [item for item in items() if isinstance(item, Twins)]
    assert {twins.relation.name for twins in pairs} == {relation.name for relation in RELATIONS}
    assert not [str(t) for t in pairs if not (is_legal(t.case) and is_legal(t.relation.play(t.case).case))]


def test_every_item_reads_back_from_its_name_and_names_differ() -> None:
    names = [str(item) for item in items()]
    assert len(set(names)) == len(names) and [str(parse_item(name)) for name in names] == names
