"""How far the demo's run has come, read from the files of its run directory."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def whole_lines(text: str) -> list[dict[str, Any]]:
    """The records of a JSONL file; a last line without its end is still being written and left out."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def newest_step(texts: Iterable[str]) -> int:
    """Last completed step in the train.jsonl texts of a run's cycles, oldest cycle first; 0 before the first step."""
    steps = [records[-1]["step"] for text in texts if (records := whole_lines(text))]
    return int(steps[-1]) if steps else 0


def last_step(run_dir: Path) -> int:
    return newest_step(path.read_text() for path in sorted(run_dir.glob("attempts/*/cycles/*/train.jsonl")))


def recoveries(run_dir: Path) -> int:
    """How often the ledger says that the run trains again."""
    files = sorted((run_dir / "ledger").glob("*.jsonl"))
    return sum(record["kind"] == "recovered" for path in files for record in whole_lines(path.read_text()))
