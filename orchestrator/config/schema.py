"""JSON Schema of the orchestrator's sections and the site file, generated from the classes.

python -m orchestrator.config.schema > configs/schema/launch_config.schema.json
"""

import json
import sys
from typing import Any

from pydantic.json_schema import models_json_schema

from .spec import SECTIONS


def schema() -> dict[str, Any]:
    """The schema as plain data; the trainer's sections of the same file have a schema of their own."""
    refs, definitions = models_json_schema([(model, "validation") for model in SECTIONS.values()])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "launch_config.schema.json",
        "title": "Orchestrator sections of a config",
        "type": "object",
        "properties": {name: refs[(model, "validation")] for name, model in SECTIONS.items()},
        "additionalProperties": True,
        **definitions,
    }


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
