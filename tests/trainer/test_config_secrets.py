"""X6 (labs-molt#128): a secret in a config is shown and kept nowhere, also where the config is wrong."""

from argparse import Namespace
from pathlib import Path

import pytest
import tiny_run

from trainer import run as run_module
from trainer.config import format_problem, load
from trainer.config.check import as_text, check
from trainer.config.secret_names import blanked, blanked_override
from trainer.config.tree import without_secrets
from trainer.launch import read_launch
from trainer.run import TrainerProcess

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
# As a password may be written by someone who does not think of YAML.
WRONG_VALUES = (
    *('"hunter2', "'hunter2", "hunter2: x", "!hunter2 x", "!hunter2!x y", "*hunter2", "&hunter2", "@hunter2"),
    *("%hunter2", "`hunter2", "[hunter2", "{hunter2", "{hunter2: [}", "- hunter2", '"hunter2\\q"', "{a: hunter2}"),
)
MISPLACED = (
    *("slurm.envv.HF_TOKEN", "slurm.ENV.HF_TOKEN", "env.HF_TOKEN", "slurm.HF_TOKEN", "HF_TOKEN", "general.api_key"),
    *("slurm.env.HF-TOKEN", "slurm.env.hf token", "slurm.env.HF_TOKEN.x", "model.model_config.wandb_api_key"),
)
WHOLE = ("slurm={env: {HF_TOKEN: hunter2", "slurm.env={HF_TOKEN: hunter2", "env={A: {HF_TOKEN: hunter2}}")


def said(path: Path, *overrides: str) -> str:
    """All that `trainer check --show` prints."""
    return "\n".join(as_text(check(path, overrides=overrides), show=True))


@pytest.mark.parametrize("value", WRONG_VALUES)
def test_a_wrong_value_in_the_file_is_not_shown(value: str, tmp_path: Path) -> None:
    """X6 (labs-molt#128)."""
    path = tmp_path / "run.yaml"
    for env in (f"slurm:\n  env:\n    HF_TOKEN: {value}\n", f"slurm:\n  env:\n    {{A: b, 'HF_TOKEN': {value}\n"):
        path.write_text(TINY.read_text() + env)
        text = said(path)
        assert "hunter" not in text
    assert f"{path}:" in text and "error" in text


@pytest.mark.parametrize("value", WRONG_VALUES)
@pytest.mark.parametrize("key", ["slurm.env.HF_TOKEN", "slurm.envv.HF_TOKEN"])
def test_a_wrong_value_on_the_command_line_is_not_shown(key: str, value: str) -> None:
    """X6 (labs-molt#128)."""
    text = said(TINY, f"{key}={value}")
    assert "hunter" not in text


@pytest.mark.parametrize("override", [*(f"{key}=hunter2" for key in MISPLACED), *WHOLE, "slurm.env.HF_TOKEN:hunter2"])
def test_a_secret_in_the_wrong_place_is_not_shown(override: str) -> None:
    """X6 (labs-molt#128)."""
    text = said(TINY, override)
    assert "hunter" not in text and "***" in text
    assert "hunter" not in "\n".join(map(format_problem, load(TINY, overrides=[override]).problems))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("slurm.env.HF_TOKEN=x", "slurm.env.HF_TOKEN=***"),
        ("slurm.env={A: x}", "slurm.env=***"),
        ("  'WANDB_API_KEY': x", "  'WANDB_API_KEY': ***"),
        ("a={b: {my_password: x}, c: d}", "a={b: {my_password: ***"),
        *((text, text) for text in ("tokens.train_steps=5", "general.run=KEY", "bos_token_id: 7", "a: TOKENIZERS_X=1")),
        *((text, text) for text in ("tokens={train_steps: 5}", "model.model_config.num_key_value_heads=3", "no key")),
    ],
)
def test_what_stands_behind_the_name_of_a_secret_is_blanked_and_nothing_else(text: str, shown: str) -> None:
    assert blanked_override(text) == shown
    assert blanked(text) == (shown if "slurm.env=" not in text else text)


def test_a_text_without_secrets_comes_back_unchanged() -> None:
    text = TINY.read_text() + "slurm: {env: {OMP_NUM_THREADS: 1}} # as it is\n"
    assert without_secrets(text) == text
    kept = without_secrets("tokens: {a: 007}\nslurm:\n  env: {HF_TOKEN: hunter2, KEY: null, no: 12:30:00}\n")
    assert kept == 'tokens:\n  a: 007\nslurm:\n  env:\n    HF_TOKEN: "***"\n    KEY: null\n    no: 12:30:00\n'
    assert "hunter" not in without_secrets("slurm: {env: [A=1, HF_TOKEN=hunter2]}\n")


def test_a_plain_run_keeps_no_secret_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """X6 (labs-molt#128): without an orchestrator the trainer reads the person's own file, and checkpoints hold it."""
    monkeypatch.setattr(run_module, "install_alone", lambda flag: None)
    config = tiny_run.make(tmp_path, train_steps=2, interval=1)
    config.write_text(config.read_text() + "slurm:\n  env: {HF_TOKEN: hunter2, HTTP_PROXY: kept}\n")
    args = Namespace(config_file=config, run_dir=tmp_path / "run", cycle=None, shm=None)
    assert TrainerProcess(read_launch(args, {})).run() == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert sum(b"HTTP_PROXY: kept" in path.read_bytes() for path in files) == 2
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
