"""Spans of methods: when each call of a class' method began and ended, while a block runs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One call: the method's name, begin and end in seconds of a clock that all processes of the machine share."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@contextmanager
def clocked(*methods: tuple[type, str]) -> Iterator[list[Span]]:
    """The spans of these methods of these classes, in the order in which their calls end."""
    spans: list[Span] = []
    before = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in before:
        setattr(owner, name, _noting(name, method, spans))
    try:
        yield spans
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _noting(name: str, method: Any, spans: list[Span]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spans.append(Span(name, start, time.perf_counter()))

    return call
