"""What README.md tells people to type exists: every pawl line parses, every make target and file it names is there."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli.commands import ckpt, control, launch, look
from trainer.data.cli import add_arguments

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TEXTS = {"README.md": README, "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()}


def commands() -> dict[str, Any]:
    """Verb → its parser, as typer makes them."""
    tree = typer.Typer()
    for module in (launch, look, control, ckpt):
        module.register(tree)
    made: Any = typer.main.get_command(tree)
    return dict(made.commands)


VERBS = commands()


def pawl_lines(text: str) -> list[str]:
    """The `pawl …` commands of a text's code blocks and spans, without what stands beside them as explanation."""
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    lines = [line for line in blocks.replace("\\\n", " ").splitlines() if line.startswith("pawl ")]
    commands = [re.split(r" {3,}| ──", line.replace("   --", " --"))[0] for line in lines]
    spans = [" ".join(span.split()) for span in re.findall(r"`(pawl [^`]+)`", text)]
    return [command.strip() for command in [*commands, *spans]]


def problem(command: str) -> str | None:
    """What the parser of the verb says against a command line; None when it takes it."""
    verb, *arguments = shlex.split(command)[1:]
    if verb == "data":
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_arguments(parser)
        try:
            parser.parse_args(arguments)
        except (argparse.ArgumentError, SystemExit) as error:
            return str(error)
        return None
    if verb not in VERBS:
        return f"no command {verb}"
    try:
        context = VERBS[verb].make_context(verb, arguments)
        if hasattr(VERBS[verb], "commands"):  # a group: its own verb comes first
            name, command, rest = VERBS[verb].resolve_command(context, arguments)
            command.make_context(name, rest)
    except Exception as error:  # the parser's own classes: typer brings a click of its own
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("command", pawl_lines(README))
def test_every_pawl_line_of_the_readme_parses(command: str) -> None:
    if command.split()[1:] in [[verb] for verb in VERBS]:
        return  # the text names a command, it does not type one
    assert problem(command) is None


def test_the_check_would_see_what_is_not_there() -> None:
    assert len(pawl_lines(README)) >= 12
    for wrong in (
        "pawl fly my.yaml",
        "pawl check my.yaml --fast",
        "pawl data prepare --input x",
        "pawl submit",
        "pawl ckpt ls",
    ):
        assert problem(wrong) is not None, wrong


@pytest.mark.parametrize("name", TEXTS)
def test_every_make_target_and_file_that_is_named_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", TEXTS[name], re.MULTILINE)) != set()
    named = {word for pair in re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", TEXTS[name], re.MULTILINE) for word in pair}
    assert named - {""} <= targets
    paths = re.findall(r"`((?:configs|ops|tests|orchestrator|trainer)/[\w./-]+)`", TEXTS[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []
