"""LaunchPlan + template → the batch script; pure and deterministic.

The templates hold no logic beyond loops, and no value enters them except through a filter that quotes it for its
reader: `sbatch` for a directive, `sh`, `words` and `export` for bash, `comment` for people. Jinja2 runs with
StrictUndefined, so a misspelt name is an error and never an empty argument.
"""

from collections.abc import Sequence
from functools import partial

import jinja2

from orchestrator.errors import PawlError, UsageError
from orchestrator.submit.plan import Directive, LaunchPlan, Setting
from orchestrator.submit.quoting import check_text, check_variable, sbatch_quote, shell_quote

_MAGIC = "#SBATCH"
_WIDTH = 110


def render_batch(plan: LaunchPlan, template: str) -> str:
    """The batch script of `plan`. Raises UsageError naming the key of a value that cannot stand in a script,
    PawlError when the template itself is broken."""
    try:
        text = _environment().from_string(template).render(plan=plan)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise PawlError(f"The batch template is broken{f' at line {line}' if line else ''}: {error}.") from error
    check_directives_first(text)
    return text


def check_directives_first(script: str) -> None:
    """Raise UsageError when a directive stands after a command, where sbatch silently ignores it."""
    commands = False
    for number, line in enumerate(script.split("\n"), start=1):
        if line.startswith(_MAGIC) and commands:
            raise UsageError(
                f"line {number} of the batch script, {line[:80]!r}, stands after a command, where sbatch ignores it. "
                "Put all #SBATCH lines directly under the shebang."
            )
        commands = commands or bool(line.strip() and not line.lstrip().startswith("#"))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "sbatch": _sbatch,
        "export": _export,
        "words": partial(_words, key="a path of the run"),
        "sh": lambda value, key: shell_quote(str(value), key=key),
        "comment": lambda value, key: check_text(str(value), key=key),
    }
    return environment


def _sbatch(directive: Directive) -> str:
    if directive.value is None:
        return f"--{directive.flag}"
    return f"--{directive.flag}={sbatch_quote(directive.value, key=directive.key)}"


def _export(setting: Setting) -> str:
    return f"{check_variable(setting.name, key=setting.key)}={shell_quote(setting.value, key=setting.key)}"


def _words(argv: Sequence[str], key: str) -> str:
    """The command, each word quoted, folded over lines of about `_WIDTH` columns so that a person can read it."""
    lines: list[str] = []
    for word in (shell_quote(argument, key=key) for argument in argv):
        if lines and len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return " \\\n    ".join(lines)
