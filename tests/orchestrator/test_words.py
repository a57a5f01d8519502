"""Counted nouns: no text of pawl says "1 nodes" or "line(s)"."""

import ast
import re
from pathlib import Path

import pytest

from orchestrator.words import plural

ROOT = Path(__file__).parents[2]
NOUNS = (
    "node|rank|step|attempt|cycle|spare|checkpoint|incident|sample|line|problem|process|GPU|CPU|file|document|shard"
    "|error|commit|rollback|beat|stage|micro-batch"
)
COUNTED = re.compile(rf"^ (?:hot )?(?:{NOUNS})(?:e?s\b|\(s\))")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (12_000, "12,000 nodes"), (-1, "-1 nodes")]
)
def test_an_s_where_it_is_due(value: int, text: str) -> None:
    assert plural(value, "node") == text


def test_nouns_that_an_s_does_not_make_many() -> None:
    assert (plural(1, "process", "processes"), plural(2, "process", "processes")) == ("1 process", "2 processes")


def bare_plurals(path: Path) -> list[str]:
    """Places of f"{n} nodes": a counted noun that is many whatever the count."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            for before, after in zip(node.values, node.values[1:], strict=False):
                text = after.value if isinstance(after, ast.Constant) and isinstance(after.value, str) else ""
                counted = isinstance(before, ast.FormattedValue) and COUNTED.match(text)
                if counted and not is_share(node, before):
                    found.append(f"{path}:{node.lineno}: {text.strip()[:30]}")
    return found


def is_share(text: ast.JoinedStr, part: ast.expr) -> bool:
    """The second number of "3 of 8 nodes", whose noun is the whole's; "0 to 7 ranks" likewise."""
    before = text.values[text.values.index(part) - 1] if text.values.index(part) else None
    words = before.value if isinstance(before, ast.Constant) and isinstance(before.value, str) else ""
    return words.endswith((" of ", " to "))


@pytest.mark.parametrize("package", ["cli", "config", "control", "decide", "metrics", "submit", "supervise", "views"])
def test_no_text_counts_without_the_helper(package: str) -> None:
    files = sorted((ROOT / "orchestrator" / package).rglob("*.py"))
    assert files and [place for file in files for place in bare_plurals(file)] == []


@pytest.mark.parametrize(
    ("text", "count"), [("{n} nodes × {m} ranks", 2), ("{k} of {n} nodes", 0), ("{n} line(s)", 1), ("{n} nodelist", 0)]
)
def test_the_search_finds_what_it_is_for(text: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(f"f'{text}'")
    assert len(bare_plurals(tmp_path / "x.py")) == count
