"""The commands of `pawl`, and what all of them have in common: exit codes and errors.

    0 ok · 1 failed · 2 usage or config · 3 HELD · 4 Slurm not reachable · 130 interrupted

An error is one paragraph on stderr; a traceback appears with -v only. The command modules imported here declare
arguments and nothing else: the code behind a command is imported when that command runs.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import typer

from orchestrator.errors import PawlError
from orchestrator.views.human import harmless_lines

app = typer.Typer(
    name="pawl",
    add_completion=False,
    no_args_is_help=True,
    # Drawing help with rich costs more than the whole command may take.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="Takes a pretraining run from one YAML file to a finished model, and keeps it moving forward.",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage or config, 3 HELD, 4 Slurm not reachable. -v shows tracebacks.",
)
_INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if argv and argv[0] == "data":
        return pass_to_trainer(argv)
    verbose = any(argument in ("-v", "--verbose") for argument in _before_dashes(argv))
    rest = [argument for argument in argv if argument not in ("-v", "--verbose")] if verbose else list(argv)
    try:
        code = _command()(rest, standalone_mode=True, prog_name="pawl")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else (0 if ended.code is None else 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except PawlError as error:
        if verbose:
            raise
        typer.echo(f"pawl: {harmless_lines(str(error))}", err=True)
        return error.exit_code
    except OSError as error:
        if verbose:
            raise
        typer.echo(f"pawl: {harmless_lines(_os_error(error))}", err=True)
        return 1
    return code if isinstance(code, int) else 0


def pass_to_trainer(argv: Sequence[str]) -> int:
    """Run `python -m trainer …` in the foreground; its exit code is ours. The packages share commands, not imports."""
    command = [sys.executable, "-m", "trainer", *argv]
    with subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}) as child:
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:
                continue  # the terminal sent it to the child as well, which decides how to end


def _command() -> Callable[..., object]:
    """The assembled command tree; importing the modules registers their commands."""
    from orchestrator.cli.commands import control, launch, look

    for module in (launch, look, control):
        module.register(app)
    return typer.main.get_command(app)


def _before_dashes(argv: Sequence[str]) -> Sequence[str]:
    return argv[: list(argv).index("--")] if "--" in argv else argv


def _os_error(error: OSError) -> str:
    where = f" {error.filename}:" if error.filename else ""
    return f"the operating system refused a file or process:{where} {error.strerror or error}. -v shows where."
