"""The command line as a person meets it: fast help with examples, exit codes, one-paragraph errors."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.app import exit_code_of_trainer, run

COMMANDS = [
    *(
        "check",
        "render",
        "submit",
        "resume",
        "fork",
        "clean",
        "controller",
        "status",
        "watch",
        "logs",
        "explain",
        "report",
    ),
    *("drain", "cancel", "save-now", "profile", "export", "data"),
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
    assert "3 HELD" in done.stdout and "-v, --verbose" in done.stdout


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
    "command", ["status", "watch", "logs", "explain", "report", "drain", "cancel", "save-now", "profile", "resume"]
)
def test_an_unknown_run_is_named_and_so_are_the_known_ones(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / "run.yaml").write_text("general: {run: alpha}\n")
    assert run([command, "beta", "--runs-root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "'beta'" in error and "alpha" in error and error.count("\n") == 1


NOT_NAMES = ["x" * 300, "a/" * 3000, "x" * 250 + "/" + "y" * 300, "a\0b", "", "../no", "/", "\udcff"]
LOOKERS = ["watch", "logs", "explain", "report", "drain", "cancel", "resume"]


@pytest.mark.parametrize(
    ("command", "name"), [*(("status", name) for name in NOT_NAMES), *((command, "x" * 300) for command in LOOKERS)]
)
def test_a_name_that_no_run_can_have_is_no_run(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, name, "--runs-root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("pawl: There is no run ") and error.count("\n") == 1 and len(error) < 400 + len(str(tmp_path))
    )


def test_a_traceback_appears_with_v_only(tmp_path: Path) -> None:
    arguments = ("status", "beta", "--runs-root", str(tmp_path))
    assert "Traceback" not in pawl(*arguments).stderr
    assert "Traceback" in pawl(*arguments, "-v").stderr


@pytest.mark.parametrize("verb", ["", "prepare", "inspect", "tokenizer", "tokenizer train"])
def test_data_is_the_trainers_command_under_pawls_name(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["data", *verb.split(), "--help"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"usage: pawl data {verb}".rstrip()) and "-m trainer" not in out
    assert f"\n  pawl data {verb}".rstrip() in out, "an example to copy"
    assert run(["data", *verb.split(), "--no-such-option"]) == 2
    assert "pawl data" in capfd.readouterr().err


def test_errors_of_data_are_pawls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for command in (["data", "inspect", str(tmp_path)], ["-v", "data", "inspect", "--no"], ["data", "inspect", "-x"]):
        assert run(command) in (1, 2)
    assert capfd.readouterr().err.startswith("pawl data: ")
    assert run(["-v", "data", "inspect", str(tmp_path)]) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("code", [*range(-64, 256)])
def test_no_exit_code_of_the_trainer_reaches_a_person(code: int) -> None:
    assert exit_code_of_trainer(code) in (0, 1, 2, 130)
    assert exit_code_of_trainer(code, interrupted=True) in (0, 130)
    assert (exit_code_of_trainer(code) == 0) == (code == 0)


@pytest.mark.parametrize(("code", "mine"), [(78, 2), (2, 2), (88, 1), (89, 1), (-2, 130), (130, 130), (-9, 1)])
def test_exit_codes_that_differ(code: int, mine: int) -> None:
    assert exit_code_of_trainer(code) == mine


def test_ctrl_c_ends_a_trainer_command_with_130_and_no_traceback_of_pawl(tmp_path: Path) -> None:
    """The terminal sends it to the whole group: pawl waits for the child and takes over its end."""
    fake = tmp_path / "trainer"
    fake.mkdir()
    (fake / "__main__.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)\n")
    (fake / "__init__.py").write_text("")
    code = "from orchestrator.cli.app import run; import sys; sys.exit(run(['data', 'prepare']))"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environ, start_new_session=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert "orchestrator" not in process.communicate()[1]


def test_ctrl_c_at_the_moment_the_child_is_reaped_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python forgets the exit code when an exception comes between waitpid and its keeping: 0 was told for it."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("")
    (tmp_path / "trainer" / "__main__.py").write_text("import sys; sys.exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    waitpid = os.waitpid

    def interrupted_just_after(pid: int, options: int) -> tuple[int, int]:
        reaped = waitpid(pid, options)
        signal.raise_signal(signal.SIGINT)
        return reaped

    monkeypatch.setattr(os, "waitpid", interrupted_just_after)
    handler = signal.getsignal(signal.SIGINT)
    assert run(["data", "prepare"]) == 130
    assert signal.getsignal(signal.SIGINT) is handler


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
