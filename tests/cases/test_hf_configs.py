"""Real config.json files of the hub are understood, and come back with every value."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint.match import model_of
from trainer.convert.hf_config import hf_config
from trainer.convert.hf_model import read_hf_config

FILES = Path(__file__).parents[3] / "shared" / "cases" / "files" / "hf_configs"
FOUND = sorted(FILES.glob("*.json"))
THETA = {"allam-7b-instruct": 1e6, "llama3.2-1b-instruct": 5e5, "qwen2.5-7b-instruct": 1e6, "qwen3-embedding-0.6b": 1e6}


@pytest.mark.public_files
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_real_config_is_understood_and_comes_back(path: Path) -> None:
    """C2, C7, C8: also where head_dim is not hidden / heads, rope_theta an integer, positions scaled by 32."""
    record: dict[str, Any] = json.loads(path.read_text())
    read = read_hf_config(record, where=path.name)
    assert read.dtype == "bfloat16" and read.transformers_version == record["transformers_version"]
    manifest = json.loads(json.dumps(read.model.model_dump()))
    assert model_of(manifest) == read.model
    back = hf_config(manifest, dtype="bfloat16", eos_id=None)
    assert {key: back.get(key) for key in record} == record
    assert back["rope_parameters"]["rope_theta"] == THETA[path.stem]
    assert back["head_dim"] == record.get("head_dim", record["hidden_size"] // record["num_attention_heads"])
    scaling = record.get("rope_scaling") or {}
    assert {key: back["rope_parameters"].get(key) for key in scaling} == scaling


@pytest.mark.public_files
def test_the_files_are_here_or_their_absence_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    if FOUND:
        assert {path.stem for path in FOUND} == set(THETA)
        return
    with capsys.disabled():
        print(f"\nNOT TESTED HERE: no config.json files at {FILES}; {len(THETA)} are known.")
