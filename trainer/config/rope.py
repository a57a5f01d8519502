"""Rotary positions as a config describes them: one section, whichever of transformers' spellings a file uses.

    rope_parameters: {rope_type, rope_theta, factor, …}       transformers 5
    rope_scaling: {rope_type or type, factor, …}              before it, rope_theta beside it

What both say must be one thing. Afterwards there is `rope_parameters` alone. Which key belongs to which type stands in
KEYS; `rules_model.py` holds a config to it, `trainer/layers/rotary.py` has the formulas.
"""

from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from .problems import Problem, Severity
from .section import Length, Section
from .typed import kind_of
from .yaml_loader import Mapping, Node, Scalar

Above = Annotated[float, Field(gt=0)]


class RopeParameters(Section):
    """How positions become angles. A key that is missing and optional has the value transformers gives it.

    `factor`: how many times longer than `original_max_position_embeddings` the model is to read. llama3 divides
    frequencies by it below `low_freq_factor` turns in the original length and leaves those above `high_freq_factor`;
    yarn likewise between `beta_slow` and `beta_fast` turns, and multiplies cosines and sines by `attention_factor`.
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: Above | None = None
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: Length | None = None
    low_freq_factor: Above | None = None
    high_freq_factor: Above | None = None
    attention_factor: Above | None = None
    beta_fast: Above | None = None
    beta_slow: Above | None = None
    mscale: Annotated[float, Field(ge=0)] | None = None
    mscale_all_dim: Annotated[float, Field(ge=0)] | None = None
    truncate: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeKeys:
    """What a rope_type needs, and what it may have besides rope_theta."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_LONGER = ("factor", "original_max_position_embeddings")
KEYS: MappingOf[str, RopeKeys] = MappingProxyType(
    {
        "default": RopeKeys(),
        "linear": RopeKeys(required=("factor",)),
        "llama3": RopeKeys(required=(*_LONGER, "low_freq_factor", "high_freq_factor")),
        "yarn": RopeKeys(
            required=_LONGER,
            optional=("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ),
    }
)
OPTIONAL_KEYS = ("rope_type", "rope_theta")


def one_rope(node: Node, path: str, problems: list[Problem]) -> Node:
    """The model's section with `rope_parameters` in place of both spellings, null meaning no such key.

    A value that they (or `type` and `rope_type`) give differently is one problem, at the older spelling.
    """
    if not isinstance(node, Mapping):
        return node
    entries = dict(node.entries)
    old, new = entries.pop("rope_scaling", None), entries.pop("rope_parameters", None)
    both = (("rope_parameters", new), ("rope_scaling", old))
    given = [(key, child) for key, child in both if child is not None and not _is_null(child)]
    if not given:
        return replace(node, entries=entries) if len(entries) < len(node.entries) else node
    merged: dict[str, Node] = {}
    for key, child in given:
        if not isinstance(child, Mapping):
            entries["rope_parameters"] = child  # the section's own check says what is wrong with it
            return replace(node, entries=entries)
        for name, value in child.entries.items():
            _add(merged, "rope_type" if name == "type" else name, value, f"{path}.{key}.{name}", problems)
    if "rope_theta" in entries and "rope_theta" in merged:
        _add(merged, "rope_theta", entries["rope_theta"], f"{path}.rope_theta", problems)
    first = given[0][1]
    entries["rope_parameters"] = Mapping(entries=merged, file=first.file, line=first.line)
    return replace(node, entries=entries)


def _add(merged: dict[str, Node], name: str, value: Node, path: str, problems: list[Problem]) -> None:
    if _is_null(value) or _is_whole(name, value):
        return
    other = merged.setdefault(name, value)
    if isinstance(other, Scalar) and isinstance(value, Scalar) and _number(other) != _number(value):
        problems.append(
            Problem(
                severity=Severity.ERROR, file=value.file, line=value.line, key=path, found=kind_of(value),
                expected=f"{other.text}, or no such key",
                message="rotary positions are given twice, and not alike",
            )
        )  # fmt: skip


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.is_null


def _is_whole(name: str, value: Node) -> bool:
    """Whether it says that all of a head is rotated, as it is here."""
    return name == "partial_rotary_factor" and isinstance(value, Scalar) and _number(value) == 1.0


def _number(value: Scalar) -> float | str:
    """1e6 and 1000000 are one number."""
    try:
        return float(value.text)
    except ValueError:
        return value.text.lower()
