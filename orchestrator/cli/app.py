"""The commands of `pawl`, and what all of them have in common: exit codes and errors.

    0 ok · 1 failed · 2 usage or config · 3 HELD · 4 Slurm not reachable · 130 interrupted

An error is one paragraph on stderr; a traceback appears with -v only. The command modules imported here declare
arguments and nothing else: the code behind a command is imported when that command runs.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated

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
    epilog="Exit codes: 0 ok, 1 failed, 2 usage or config, 3 HELD, 4 Slurm not reachable, 130 interrupted.",
)
_INTERRUPTED = 130
_CONFIG_ERROR = 78


@app.callback()
def _pawl(
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show the traceback of an error; anywhere on the line.")
    ] = False,
) -> None:
    # `run` takes -v out of the line before it is parsed; it stands here for the help.
    del verbose


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    verbose = any(argument in ("-v", "--verbose") for argument in _before_dashes(argv))
    rest = [argument for argument in argv if argument not in ("-v", "--verbose")] if verbose else list(argv)
    if rest and rest[0] == "data":
        return pass_to_trainer("data", [*(["-v"] if verbose else []), *rest[1:]], prog="pawl data")
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


def pass_to_trainer(command: str, arguments: Sequence[str], *, prog: str) -> int:
    """Run `python -m trainer COMMAND …` in the foreground under the name `prog`; the exit code is one of pawl's."""
    words = [sys.executable, "-m", "trainer", command, "--prog", prog, *arguments]
    pressed: list[int] = []
    # No KeyboardInterrupt here: raised just after the child was reaped, it would lose the exit code, and the next wait
    # answers 0 for a child that is gone. The terminal sends the signal to the child as well, which decides how to end.
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        code = subprocess.Popen(words, env={**os.environ, "PYTHONSAFEPATH": "1"}).wait()
    finally:
        signal.signal(signal.SIGINT, before)
    interrupted = bool(pressed)
    if code < 0 and not interrupted and code != -signal.SIGINT:
        typer.echo(f"pawl: `{prog}` was killed by signal {-code}; nothing of it runs any more.", err=True)
    return exit_code_of_trainer(code, interrupted=interrupted)


def exit_code_of_trainer(code: int, *, interrupted: bool = False) -> int:
    """pawl's exit code for one of the trainer's, negative ones being signals: the one place where they meet.

    The trainer's own codes (86–93) tell the supervisor how to go on with a run; a person's command has no use for them.
    """
    if code == 0:
        return 0
    if interrupted or code in (-signal.SIGINT, _INTERRUPTED):
        return _INTERRUPTED
    return 2 if code in (2, _CONFIG_ERROR) else 1


@cache
def _command() -> Callable[..., object]:
    """The assembled command tree; once, because registering again would add every command again."""
    from orchestrator.cli.commands import ckpt, control, launch, look

    for module in (launch, look, control, ckpt):
        module.register(app)
    return typer.main.get_command(app)


def _before_dashes(argv: Sequence[str]) -> Sequence[str]:
    return argv[: list(argv).index("--")] if "--" in argv else argv


def _os_error(error: OSError) -> str:
    where = f" {error.filename}:" if error.filename else ""
    return f"the operating system refused a file or process:{where} {error.strerror or error}. -v shows where."
