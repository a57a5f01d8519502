"""Counted nouns: the one place that knows when an s is due. Pure, and below every other module."""


def plural(value: int | float, noun: str, many: str | None = None) -> str:
    """1 step · 3 steps · 2 processes (`many` where an s is not enough)"""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {many or noun + 's'}"
