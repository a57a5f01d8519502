"""The loader keeps what was written; the receiving field decides. Cases F1, F3 and F4, with their whole kind."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.problems import Problem, Severity, did_you_mean, format_problem
from trainer.config.tree import from_json, to_json, to_plain, to_yaml
from trainer.config.typed import HOLE, Reading, read, scalar_value, walk
from trainer.config.yaml_loader import MAX_BYTES, Mapping, Node, Scalar, load_file, parse_bytes, parse_text

FIXTURE = Path(__file__).parents[1] / "fixtures" / "config" / "yaml_corner_cases.yaml"


def read_one(text: str, annotation: object) -> object:
    """The value of `key: TEXT` for a field of the given type; HOLE when it is refused."""
    document = parse_text(f"key: {text}\n", file="f.yaml")
    assert not document.problems, document.problems
    return read(document.root.entries["key"], annotation, "key", Reading())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-4", 1e-4), ("3E-5", 3e-5), ("1.e-8", 1e-8), (".1", 0.1), ("1", 1.0), ("-2.5", -2.5), ("+3", 3.0)],
        *[("1_000.5", 1000.5), ("1e3", 1000.0), ("0.0416", 0.0416), ("6.02E+23", 6.02e23)],
    ],
)
def test_numbers_are_floats_in_float_fields(text: str, value: float) -> None:
    """F1 (confuse#91, LlamaFactory#4014)."""
    assert read_one(text, float) == value


@pytest.mark.parametrize("text", ["1e-4", "3E-5", "1e3", "010", "007", "no", "on", "12:30:00", "1:30", "2-00:00:00"])
def test_text_fields_keep_the_text(text: str) -> None:
    """F1 (confuse#91, LlamaFactory#4014); F3 (YAML 1.1 base-60)."""
    assert read_one(text, str) == text


@pytest.mark.parametrize(
    ("text", "value"), [("010", 10), ("007", 7), ("16_000", 16000), ("1e5", 100000), ("-3", -3), ("2.0", 2)]
)
def test_whole_numbers_are_decimal(text: str, value: int) -> None:
    result = read_one(text, int)
    assert result == value and type(result) is int


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("No", False), ("on", True), ("OFF", False), ("true", True), ("False", False)]
)
def test_words_are_booleans_in_boolean_fields_only(text: str, value: bool) -> None:
    assert read_one(text, bool) is value
    assert read_one(text, str) == text
    assert read_one(text, int) is HOLE


@pytest.mark.parametrize(
    ("text", "annotation"),
    [
        *[('"1"', int), ("'0.1'", float), ('"yes"', bool), ("1", bool), ("0", bool), ("y", bool), ("1.5", int)],
        *[("0x10", int), ("1:30", int), ("12:30:00", float), ("1e-4x", float), ("~", str), ("null", int), ("", float)],
        *[("1_", int), ("_1", int), ("1__0", int), ("９", int), ("1e400", int), ("abc", float), ("1,000", float)],
    ],
)
def test_what_is_not_meant_is_refused(text: str, annotation: type) -> None:
    assert read_one(text, annotation) is HOLE


def test_a_quoted_number_is_refused_aloud() -> None:
    reading = Reading()
    node = parse_text('zero_stage: "1"\n', file="f.yaml").root.entries["zero_stage"]
    assert read(node, int, "zero_stage", reading) is HOLE
    (problem,) = reading.problems
    assert (problem.line, problem.expected) == (1, "a whole number without quotes")
    assert "in quotes" in str(problem.found)


@pytest.mark.parametrize("text", [".nan", "nan", "-.inf", "inf", ".INF"])
def test_special_floats_are_read_as_such(text: str) -> None:
    value = scalar_value(text, float)
    assert value is not None and not float("-inf") < value < float("inf")


def test_the_composed_file_of_corner_cases() -> None:
    """F1 (confuse#91, LlamaFactory#4014)."""
    document = load_file(FIXTURE)
    assert [(p.key, p.line, p.message) for p in document.problems] == [("dup", 23, "this key is given twice")]
    root = document.root.entries
    expected: list[tuple[str, object, object]] = [
        *[("learning_rate", float, 1e-4), ("min_decay_lr", float, 3e-5), ("adam_eps", float, 1e-8)],
        *[("weight_decay", float, 0.1), ("clip_grad", float, 1.0), ("zero_stage", int, HOLE)],
        *[("tie_word_embeddings", bool, True), ("norm_flag", bool, True), ("lang_tag", str, "no")],
        *[("time", str, "12:30:00"), ("time_short", str, "1:30"), ("days", str, "2-00:00:00"), ("mem", int, 16000)],
        *[("job_name", str, "007"), ("account", str, "1e3"), ("run", str, "llama_%date_%jobid")],
        *[("nodelist", str, "node[001-004,007]"), ("exclude", list[str], ["node001", "gpu-a2"])],
        *[("empty", str | None, None), ("tilde", str | None, None), ("dup", int, 1)],
    ]
    assert {name for name, _, _ in expected} == set(root)
    for name, annotation, value in expected:
        assert read(root[name], annotation, name, Reading()) == value, name


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun\n", 1, "script"),
        (b"", 1, "empty"),
        (b"# only a comment\n\n", 1, "empty"),
        (b"\x7fELF\x02\x01\x01\x00\x00", 1, "binary"),
        (b"general:\n  run: a\x00b\n", 2, "binary"),
        (b"general:\n  run: caf\xe9\n", 2, "UTF-8"),
        (b"general:\n\trun: x\n", 2, "tab"),
        (b"general:\n  a: 1\n\tb: 2\n", 3, "tab"),
        (b"just a sentence\n", 1, "text"),
        (b"- a\n- b\n", 1, "list"),
        (b"general:\n  run: [a, b\n", 3, "not YAML"),
        (b"general: a: b\n", 1, "not YAML"),
        (b"export A=1\nmodule load cuda\n", 1, "text"),
        (b"a: 1\n---\nb: 2\n", 2, "second document"),
        (b"{a: 1}: 2\n", 1, "stands as a key"),
        (b"a: *nothing\n", 1, "names nothing"),
        (b"%YAML 9.9\n---\na: 1\n", 1, "not YAML"),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_place(data: bytes, line: int, words: str) -> None:
    """F4 (nanotron#166, #121)."""
    document = parse_bytes(data, file="run.yaml")
    (problem,) = document.problems
    assert problem.line == line and words in problem.message
    shown = format_problem(problem)
    assert "\n" not in shown and shown.startswith(f"run.yaml:{line}: error: ") and problem.expected


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_BYTES + 1))
    for path, words in ((tmp_path / "none.yaml", "cannot be read"), (tmp_path, "no regular file"), (big, "too large")):
        (problem,) = load_file(path).problems
        assert words in problem.message and problem.file == str(path)


def test_tags_merge_keys_and_duplicates_are_all_named() -> None:
    text = "a: !!python/object/apply:os.system ['id']\nb: &x {k: 1}\nc:\n  <<: *x\n  k: 2\n"
    text += "d:\n  e: 1\n  e: 2\nf: !!str 5\n"
    problems = parse_text(text, file="f").problems
    assert [(p.line, p.key) for p in problems] == [(1, "a"), (4, "c"), (8, "d.e"), (9, "f")]
    assert "first on line 7" in str(problems[2].expected)


def test_an_alias_is_its_anchor_at_the_place_of_use() -> None:
    root = parse_text("a: &x [1, 2]\nb: *x\n", file="f").root
    assert to_plain(root) == {"a": [1, 2], "b": [1, 2]}
    assert root.entries["b"].line == 2


def test_alias_bombs_and_cycles_end_early() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    assert any("aliases" in p.message for p in parse_text(bomb, file="f").problems)
    assert any("names nothing that is complete" in p.message for p in parse_text("a: &x [*x]\n", file="f").problems)
    assert any("nested too deep" in p.message for p in parse_text("a: " + "[" * 200 + "]" * 200, file="f").problems)


def test_a_byte_order_mark_is_no_content() -> None:
    assert to_plain(parse_bytes("\ufeffa: 1\n".encode(), file="f").root) == {"a": 1}


def test_plain_data_keeps_ambiguous_spellings_as_text() -> None:
    text = "a: 010\nb: 12:30:00\nc: no\nd: 1e3\ne: 8\nf: '8'\ng: true\nh: ~\ni: 16_000\nj: 0.5\n"
    plain = to_plain(parse_text(text, file="f").root)
    assert plain == {
        **{"a": "010", "b": "12:30:00", "c": "no", "d": 1000.0, "e": 8, "f": "8", "g": True, "h": None},
        **{"i": "16_000", "j": 0.5},
    }


AWKWARD = ["12:30:00", "no", "007", "1e-4", "-", "---", "null", "~", "a: b", "# x", "${paths.x}", "[a", "x "]
SCALARS: st.SearchStrategy[Node] = st.builds(
    Scalar,
    text=st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(
        ["12:30:00", "no", "007", "1e-4", "-", "---", "null", "~", "a: b", "# x", "${paths.x}", "[a", "x "]
    ),
    quoted=st.booleans(),
    file=st.just("f"),
    line=st.just(0),
)


def bare(node: Mapping) -> dict[str, tuple[str, bool]]:
    """Path → (text, is text for sure): what a receiving field sees. A nothing has many spellings."""
    return {path: ("", False) if s.is_null else (s.text, s.quoted) for path, s in walk(node)}


@given(st.dictionaries(st.sampled_from("abc") | st.text("xyz: #-", min_size=1, max_size=4), SCALARS, max_size=4))
@settings(max_examples=50, deadline=None)
def test_yaml_text_reads_back_to_the_same_tree(entries: dict[str, Node]) -> None:
    """Quotes may be added to what is text anyway, never to or from what would read as a number or a truth."""
    root = Mapping(entries={**entries, "deep": Mapping(entries=entries, file="f", line=0)}, file="f", line=0)
    back = parse_text(to_yaml(root), file="f")
    assert not back.problems
    for path, (text, quoted) in bare(root).items():
        again = bare(back.root)[path]
        assert again[0] == text
        reads_as_value = any(scalar_value(text, kind) is not None for kind in (bool, int, float))
        assert again[1] == quoted or not reads_as_value, path


def test_json_form_keeps_texts_quotes_and_marks() -> None:
    root = parse_text("slurm:\n  time: 12:30:00\n  name: '7'\n  exclude: [a, b]\n", file="f.yaml").root
    assert from_json(to_json(root)) == root


def test_nearest_known_name() -> None:
    assert did_you_mean("learing_rate", ["learning_rate", "min_decay_lr"]) == "did you mean 'learning_rate'?"
    assert did_you_mean("TP", ["tp", "pp"]) == "did you mean 'tp'?"
    assert did_you_mean("qqq", ["b", "a"]) == "one of a, b"


def test_a_problem_is_one_printable_line() -> None:
    problem = Problem(
        severity=Severity.ERROR, file="f", line=3, key="k", found="a\n\x1b[31m" + "x" * 200, expected="y", message="m"
    )
    shown = format_problem(problem)
    assert shown.isprintable() and len(shown) < 140 and shown.startswith("f:3: error: k: m (found a\\n\\x1b")
