"""Holds every record of a run directory to its schema in configs/schema/."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema

SCHEMAS = Path(__file__).parents[1] / "configs" / "schema"
RECORDS = {
    "launch_facts.json": "launch_facts",
    "ledger/*.jsonl": "ledger_line",
    "control/*": "control",
    "attempts/*/intent.json": "intent",
    "attempts/*/claim": "claim",
    "attempts/*/nodes.json": "nodes",
    "attempts/*/cycles/*/cycle.json": "cycle",
    "attempts/*/cycles/*/train.jsonl": "train_line",
    "attempts/*/cycles/*/validation.jsonl": "validation",
    "attempts/*/cycles/*/outcomes/*.json": "outcome",
    "checkpoints/step-*/manifest.json": "manifest",
    "checkpoints/step-*/index.json": "index",
}


def problems(run_dir: Path) -> list[str]:
    """What in the run directory does not follow its schema, one sentence each. A torn last line is no problem."""
    return [
        f"{path.relative_to(run_dir)}:{number}: {error.json_path}: {error.message}"
        for pattern, name in RECORDS.items()
        for path in sorted(run_dir.glob(pattern))
        for number, record in _records(path)
        for error in _validator(name).iter_errors(record)
    ]


def _records(path: Path) -> Iterator[tuple[int, object]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        yield 1, json.loads(text)
        return
    whole, _, _ = text.rpartition("\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        yield number, json.loads(line)


def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))
