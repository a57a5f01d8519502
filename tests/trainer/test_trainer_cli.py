"""The trainer's command line: help with examples, one paragraph per error, nothing heavy before it is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import COMMANDS, Command, main, parser_for

CONFIGS = Path(__file__).parents[2] / "configs"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainer", *args], capture_output=True, text=True, timeout=60)


def test_the_overview_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name} " in shown and command.example in shown


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_its_example(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    name, example = command.name, command.example
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0 and example in capsys.readouterr().out


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2 and "'train'" in capsys.readouterr().err


def test_an_error_is_one_paragraph_and_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["inspect", str(tmp_path / "nothing")]
    code = main(argv)
    shown = capsys.readouterr().err
    assert code not in (0, 2) and shown.startswith("trainer inspect: ") and "Traceback" not in shown
    assert shown.count("\n") == 1


def test_train_takes_the_arguments_of_the_launch_command() -> None:
    words = ["--config-file", "c.yaml", "--run-dir", "d", "--cycle", "d/cycle.json", "--shm", "/dev/shm/x"]
    train = next(command for command in COMMANDS if command.name == "train")
    args = parser_for(train).parse_args(words)
    assert [str(value) for value in (args.config_file, args.run_dir, args.cycle, args.shm)] == words[1::2]


def test_check_is_free_of_torch() -> None:
    """What keeps it quick; `make bench` measures how quick."""
    path = str(CONFIGS / "demo.yaml")
    code = f"import sys, trainer.cli; trainer.cli.main(['check', {path!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
