"""JSON Schema of the trainer's sections, generated from the classes; `configs/schema/config.schema.json` is its output.

python -m trainer.config.schema > configs/schema/config.schema.json
"""

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from .model import Config


def schema() -> dict[str, Any]:
    """The schema as plain data. Editors use it for completion; `check` knows more (rules over several values)."""
    body = TypeAdapter(Config).json_schema()
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "config.schema.json",
        "title": "Trainer sections of a config",
    }
    # The orchestrator's sections stand in the same file and have a schema of their own.
    return {**body, **head, "additionalProperties": True}


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
