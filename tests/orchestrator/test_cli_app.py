"""The command line as a person meets it: fast help with examples, exit codes, one-paragraph errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.app import run

COMMANDS = [
    *("check", "render", "submit", "resume", "controller", "status", "watch", "logs", "explain", "report"),
    *("drain", "cancel", "save-now", "export", "data"),
]
HEAVY = ("torch", "rich", "pydantic", "jinja2", "prometheus_client", "plotly", "yaml", "submitit", "transformers")


def pawl(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


def test_help_lists_every_command() -> None:
    done = pawl("--help")
    assert done.returncode == 0
    assert [name for name in COMMANDS if f"\n  {name} " not in done.stdout] == []
    assert "3 HELD" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchestrator", "--help"], capture_output=True, text=True, timeout=60
    )
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & set(HEAVY)
    assert "typer" in imported


@pytest.mark.parametrize("process", ["supervise", "agent"])
def test_processes_inside_a_job_do_not_load_the_command_line(process: str) -> None:
    code = (
        f"import sys; sys.argv = ['orchestrator', {process!r}, '--help']\n"
        "import runpy\n"
        "try:\n    runpy.run_module('orchestrator', run_name='__main__')\n"
        "except SystemExit as ended: code = ended.code\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'typer', 'rich', 'torch', 'pydantic', 'yaml', 'jinja2'}), code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "data"])
def test_every_command_explains_itself_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    assert f"\n  pawl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["no-such"], ["submit"], ["submit", "a", "b"], ["logs", "x", "--rank", "no"], ["check", "--no"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["status", "watch", "logs", "explain", "report", "drain", "cancel", "save-now", "resume"]
)
def test_an_unknown_run_is_named_and_so_are_the_known_ones(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / "run.yaml").write_text("general: {run: alpha}\n")
    assert run([command, "beta", "--runs-root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "'beta'" in error and "alpha" in error and error.count("\n") == 1


def test_a_traceback_appears_with_v_only(tmp_path: Path) -> None:
    arguments = ("status", "beta", "--runs-root", str(tmp_path))
    assert "Traceback" not in pawl(*arguments).stderr
    assert "Traceback" in pawl(*arguments, "-v").stderr


def test_data_is_the_trainers_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "prepare", "--help"]) == 0
    assert "--tokenizer" in capfd.readouterr().out
    assert run(["data", "prepare", "--no-such-option"]) == 2


def test_a_missing_site_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAWL_SITE", str(tmp_path / "none.yaml"))
    assert run(["status"]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_runs_root_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("option", "variable", "site", "here/runs"):
        (tmp_path / name / name.split("/")[0]).mkdir(parents=True)
        (tmp_path / name / name.split("/")[0] / "run.yaml").write_text("general: {run: x}\n")
    site = tmp_path / "site.yaml"
    site.write_text(f"runs_root: {tmp_path / 'site'}\n")
    monkeypatch.chdir(tmp_path / "here")

    def runs(*arguments: str) -> str:
        assert run(["status", "--json", *arguments]) == 0
        return capsys.readouterr().out

    assert '"here"' in runs()
    monkeypatch.setenv("PAWL_SITE", str(site))
    assert f"{tmp_path}/site/site" in runs()
    monkeypatch.setenv("PAWL_RUNS", str(tmp_path / "variable"))
    assert f"{tmp_path}/variable/variable" in runs()
    assert f"{tmp_path}/option/option" in runs("--runs-root", str(tmp_path / "option"))
