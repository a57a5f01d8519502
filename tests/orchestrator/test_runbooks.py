"""Each rule has a page, and each page a rule."""

from pathlib import Path

from orchestrator.decide.rules_cycle import CYCLE_RULES
from orchestrator.decide.rules_run import RUN_RULES

RUNBOOKS = Path(__file__).parents[2] / "ops" / "runbooks"
PARTS = ("**What it means.**", "**What pawl does.**", "**What you can do.**")


def test_every_rule_has_a_page_and_every_page_a_rule() -> None:
    rules = {rule.name for rule in (*CYCLE_RULES, *RUN_RULES)}
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == rules


def test_every_page_answers_the_three_questions() -> None:
    for page in RUNBOOKS.glob("*.md"):
        text = page.read_text()
        assert text.startswith(f"# {page.stem}\n")
        assert all(part in text for part in PARTS), page.name
