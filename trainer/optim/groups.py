"""Parameter groups by name: factors on learning rate and weight decay. Pure.

A group's pattern is a shell pattern (`*`, `?`, `[…]`) over canonical names; of the patterns that fit a parameter the
first in the config decides. What a parameter gets stands in its row of the parameter table and nowhere else: optimizer
and checkpoint know parameters by name, never by a position in a group.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar


class Pattern(Protocol):
    """An entry of optimizer.groups."""

    @property
    def match(self) -> str: ...


P = TypeVar("P", bound=Pattern)


def group_of(name: str, groups: Sequence[P]) -> P | None:
    """The first group whose pattern fits the canonical `name`."""
    return next((group for group in groups if fnmatchcase(name, group.match)), None)


def useless(groups: Sequence[Pattern], names: Sequence[str]) -> dict[int, bool]:
    """Groups that decide about none of `names`, by index; True where the pattern fits some that earlier ones take."""
    deciding = {id(group_of(name, groups)) for name in names}
    return {
        index: any(fnmatchcase(name, group.match) for name in names)
        for index, group in enumerate(groups)
        if id(group) not in deciding
    }
