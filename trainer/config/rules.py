"""Judgements over several values of a config: named pure rules."""

from typing import Any

from .problems import Problem
from .yaml_loader import Mapping


def judge(config: Any, tree: Mapping) -> list[Problem]:
    """Findings of all rules, each at the line of the key it is about."""
    return []
