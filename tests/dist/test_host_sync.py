"""A step asks the device for a number at one place: where the totals of the step are read, which has to be waited for.

Every other such question would make the host wait until the device has caught up, once a step or once a micro-batch.
On a CPU nothing waits, so what is looked for is the question itself: from Python, and from inside operators.
"""

import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import pytest
import torch
from dist.pool import Pool, Ranks
from dist.step_cases import engine_on
from engine_world import tiny_batch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.engine import Engine
from trainer.mesh.topology import Topology

# What makes the host read a tensor's values, by the name Python or the dispatcher knows it by.
_FROM_PYTHON = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_FROM_OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "is_nonzero", "equal"}

# Indexing by a mask counts its elements, which a CPU does without asking the dispatcher.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}

Seen = list[tuple[str, str]]


def where() -> str:
    """`file:function` of the innermost line of the trainer that is running."""
    frames = [frame for frame in traceback.extract_stack() if "/trainer/" in frame.filename]
    frame = [frame for frame in frames if "/tests/" not in frame.filename][-1]
    return f"{frame.filename.rpartition('/trainer/')[2]}:{frame.name}"


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Python(TorchFunctionMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _FROM_PYTHON:
            self.seen.append((name, where()))
            with torch._C.DisableTorchFunction():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        if name in _FROM_OPERATORS or (name in _INDEXING and _has_mask(args[1])):
            self.seen.append((name, where()))
        return function(*args, **(kwargs or {}))


class HostReads:
    """(what, where) of every read of a tensor's values by the host, in order."""

    def __init__(self) -> None:
        self.seen: Seen = []
        self._modes: Sequence[Any] = (_Python(self.seen), _Operators(self.seen))

    def __enter__(self) -> Self:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


def step(engine: Engine, number: int, *, num_valid: int | None) -> Seen:
    """Train one step; what the host read meanwhile, the batch apart: it lies on the host on every machine."""
    batch = tiny_batch(number + 10 * engine.ctx.get_dp_rank())
    next_valid = batch.num_valid
    with HostReads() as reads:
        result = engine.train_step(
            batch, lr=1e-3, weight_decay=0.1, adam_t=number, num_valid=num_valid, next_valid=next_valid
        )
    assert result.finite and result.skipped is None
    return [(what, place) for what, place in reads.seen if not place.startswith("data/batch.py:")]


def reads_of_a_step(ranks: Ranks, topology: Topology, options: dict[str, object], counted: bool) -> Seen:
    """What the second step reads; the first makes plans and tables."""
    engine = engine_on(ranks, topology, **options)
    step(engine, 1, num_valid=None)
    return step(engine, 2, num_valid=40 if counted else None)


CASES: list[tuple[Topology, dict[str, object]]] = [
    (Topology(), {"recompute": "selective", "document_masks": True, "dtype": "bfloat16"}),
    (Topology(dp=2, pp=2, tp=2), {"layers": 4, "recompute": "full"}),
    (Topology(dp=2, pp=2), {"layers": 4, "pp_engine": "zb-v", "zero_stage": 0, "tied": False}),
    (Topology(pp=2, tp=2), {"layers": 4, "pp_engine": "interleaved", "tp_mode": "REDUCE_SCATTER"}),
]


@pytest.mark.parametrize(("topology", "options"), CASES)
def test_a_step_reads_its_totals_and_nothing_else(pool: Pool, topology: Topology, options: dict[str, object]) -> None:
    for seen in pool.run(topology, reads_of_a_step, topology, options, True):
        assert seen == [("tolist", "engine.py:_reduce_totals")]


def test_labels_that_nobody_counted_are_one_read_more(pool: Pool) -> None:
    (seen,) = pool.run(Topology(), reads_of_a_step, Topology(), {}, False)
    assert {place for _, place in seen} == {"engine.py:_count_valid", "engine.py:_reduce_totals"}


def asks_in_the_step(ranks: Ranks, how: str) -> Seen:
    """An engine whose clipping asks the device, in one of the ways a step must not."""
    engine = engine_on(ranks, Topology())
    step(engine, 1, num_valid=None)
    zero = engine.optimizer.zero_grads

    def asking() -> None:
        zero()
        x = engine.optimizer.storages[0].grads
        {"bool": lambda: bool(x.any()), "item": lambda: x[0].item(), "mask": lambda: x[x > 0]}[how]()

    engine.optimizer.zero_grads = asking  # type: ignore[method-assign]
    return step(engine, 2, num_valid=40)


@pytest.mark.parametrize("how", ["bool", "item", "mask"])
def test_a_question_is_found(pool: Pool, how: str) -> None:
    (seen,) = pool.run(Topology(), asks_in_the_step, how)
    assert len(seen) > 1
