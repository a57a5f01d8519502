"""One value, quoted for the place where it will stand; pure.

Three readers take text apart in a batch script, each by its own rules: bash (the body), sbatch (the `#SBATCH`
lines) and a person (the dry run, where secrets must not show). Characters that no quoting makes safe in a line,
such as newlines, are refused with the key that carried them.
"""

import re
import shlex
import unicodedata

from orchestrator.config.secret_names import REDACTED as REDACTED
from orchestrator.errors import UsageError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./^\[\]-]+")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Controls, invisible format characters (bidirectional overrides), lone surrogates, line and paragraph separators.
_REFUSED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# sbatch copies each argument of a directive into a fixed buffer.
_MAX_DIRECTIVE_BYTES = 4096


def check_text(value: str, *, key: str) -> str:
    """`value` itself when it can stand in one line. Raises UsageError naming `key` otherwise."""
    for index, character in enumerate(value):
        if unicodedata.category(character) in _REFUSED_CATEGORIES:
            raise UsageError(
                f"{key}: character {index + 1} of its value is U+{ord(character):04X} (a newline, control or invisible "
                "character), which cannot be passed on safely. Remove it."
            )
    return value


def shell_quote(value: str, *, key: str) -> str:
    """One bash word that reads back as exactly `value`."""
    return shlex.quote(check_text(value, key=key))


def sbatch_quote(value: str, *, key: str) -> str:
    """One argument of a `#SBATCH` line that sbatch reads back as exactly `value`.

    sbatch is no shell: a backslash escapes also inside single quotes and an unquoted `#` starts a comment, so
    shlex.quote would change values here. In double quotes only `\\` and `"` are special.
    """
    check_text(value, key=key)
    if len(value.encode()) > _MAX_DIRECTIVE_BYTES:
        raise UsageError(f"{key}: {len(value.encode())} bytes are too long for an #SBATCH line; use fewer than 4,096.")
    if _PLAIN.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def check_variable(name: str, *, key: str) -> str:
    """`name` letter for letter when it is a shell identifier. Raises UsageError naming `key` otherwise."""
    if not _IDENTIFIER.fullmatch(name):
        raise UsageError(
            f"{key}: {name[:80]!r} is no name of an environment variable. Use letters, digits and _, no digit first."
        )
    return name
