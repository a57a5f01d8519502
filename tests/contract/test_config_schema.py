"""The schemas of a config are the classes', and every config of the repository is valid by them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from orchestrator.config import schema as launch_schema
from orchestrator.config.site import KEYS
from orchestrator.config.spec import SECTIONS
from trainer.config import load
from trainer.config import schema as config_schema
from trainer.config.facts import as_data, launch_facts
from trainer.config.load import ORCHESTRATOR_SECTIONS, SITE_KEYS
from trainer.config.secret_names import OWN_KEYS, is_secret
from trainer.config.tree import to_plain

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "configs" / "schema"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def schema(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((SCHEMAS / name).read_text())
    jsonschema.Draft202012Validator.check_schema(data)
    return data


def test_the_files_are_what_the_code_generates() -> None:
    """Rewrite them by `python -m trainer.config.schema` and `python -m orchestrator.config.schema`."""
    assert (SCHEMAS / "config.schema.json").read_text() == config_schema.text()
    assert (SCHEMAS / "launch_config.schema.json").read_text() == launch_schema.text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_valid_by_both_schemas(path: Path) -> None:
    loaded = load(path)
    assert loaded.config is not None
    plain = to_plain(loaded.merged)
    jsonschema.validate(as_data(loaded.config), schema("config.schema.json"))
    jsonschema.validate({name: plain[name] for name in SECTIONS if name in plain}, schema("launch_config.schema.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_launch_facts_are_valid_by_their_schema(path: Path) -> None:
    config = load(path).config
    assert config is not None
    jsonschema.validate(launch_facts(config), schema("launch_facts.schema.json"))


def test_both_packages_agree_on_the_sections() -> None:
    assert tuple(SECTIONS) == ORCHESTRATOR_SECTIONS
    assert KEYS == SITE_KEYS


def property_names(data: Any) -> set[str]:
    if isinstance(data, dict):
        own = data["properties"] if isinstance(data.get("properties"), dict) else {}
        return set(own).union(*map(property_names, data.values()))
    return set().union(*map(property_names, data)) if isinstance(data, list) else set()


def test_a_key_that_sounds_like_a_secret_is_known_as_none() -> None:
    names = property_names([schema("config.schema.json"), schema("launch_config.schema.json")])
    assert len(names) > 100 and {name for name in names if is_secret(name)} == OWN_KEYS


def test_every_schema_is_named_in_the_readme() -> None:
    text = (SCHEMAS / "README.md").read_text()
    assert all(path.name in text for path in SCHEMAS.iterdir() if path.name != "README.md")
