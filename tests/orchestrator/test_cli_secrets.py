"""X6 (labs-molt#128): no command prints a secret, in whatever way the config that holds it is wrong."""

from pathlib import Path

import pytest

from orchestrator.cli.app import run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
MISTAKES = {
    "open-quote": 'slurm: {env: {HF_TOKEN: "hunter2}}',
    "tag": "slurm:\n  env:\n    HF_TOKEN: !hunter2 x",
    "misspelt-section": "slurm: {environment: {HF_TOKEN: hunter2}}",
    "wrong-section": "env: {HF_TOKEN: hunter2}",
    "list": "slurm: {env: [HF_TOKEN=hunter2]}",
}
OVERRIDES = (
    'slurm.env.HF_TOKEN="hunter2',
    "slurm.envv.HF_TOKEN=hunter2",
    "slurm.env.HF_TOKEN:hunter2",
    "A.KEY={hunter2",
)


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("command", [["check", "--show"], ["check", "--json"], ["submit", "--launcher", "local"]])
def test_a_wrong_config_shows_no_secret(
    mistake: str, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """X6 (labs-molt#128)."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{TINY.read_text()}{MISTAKES[mistake]}\n")
    assert run([command[0], str(path), *command[1:]]) == 2
    said = capfd.readouterr()
    assert "hunter" not in said.out + said.err and "error" in said.out + said.err


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("command", [["check", "--show"], ["check", "--json"]])
def test_a_wrong_override_shows_no_secret(override: str, command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """X6 (labs-molt#128)."""
    assert run([command[0], str(TINY), *command[1:], "--set", override]) == 2
    said = capfd.readouterr()
    assert "hunter" not in said.out + said.err and "error" in said.out + said.err
