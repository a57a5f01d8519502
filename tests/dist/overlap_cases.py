"""Functions run on the pool's ranks by test_overlap.py: the same steps with communication early, late or as it comes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any
from unittest.mock import patch

import torch
from dist.pool import Ranks
from dist.step_cases import digest, engine_on
from engine_world import tiny_batch

from trainer import comm
from trainer.comm import Pending
from trainer.mesh.topology import Topology
from trainer.optim import optimizer as module


class When(StrEnum):
    """When a collective moves its data: at its start, at its wait, or somewhere between."""

    AT_START = "start"
    AT_WAIT = "wait"
    BETWEEN = "between"
    NOTHING_STARTS_EARLY = "no overlap"


class Late(Pending):
    """A collective that does nothing until it is waited for."""

    def __init__(self, begin: Callable[[], Pending]) -> None:
        self.work, self.finish, self.begin = None, None, begin

    def wait(self) -> None:
        begin, self.begin = self.begin, Pending
        begin().wait()


@contextmanager
def moving(when: When) -> Iterator[None]:
    """The optimizer's collectives move their data `when`."""
    starts = {name: getattr(comm, name) for name in ("start_reduce_scatter", "start_all_gather")}

    def replaced(start: Callable[..., Pending]) -> Callable[..., Pending]:
        def at_start(*args: Any) -> Pending:
            pending = start(*args)
            pending.wait()
            return pending

        def at_wait(*args: Any) -> Pending:
            return Late(lambda: start(*args))

        return at_wait if when is When.AT_WAIT else at_start

    if when in (When.BETWEEN, When.NOTHING_STARTS_EARLY):
        yield
        return
    with patch.multiple(module, **{name: replaced(start) for name, start in starts.items()}):
        yield


def overlapped(
    ranks: Ranks, topology: Topology, when: When, options: dict[str, object]
) -> tuple[list[str], dict[str, str], list[int], list[int], int]:
    """Three steps and an evaluation.

    Returns what each computed, weight digests, the order in which buckets were reduced in the last step, how many of
    them before the end of backward in each step, and the number of communication calls.
    """
    with moving(when):
        engine = engine_on(ranks, topology, **options)
        if when is When.NOTHING_STARTS_EARLY:
            engine.watch.begin = lambda order: None  # type: ignore[method-assign]
        order: list[int] = []
        early: list[int] = []
        start, end = engine.watch._start, engine.watch.end
        engine.watch._start = lambda index: (order.append(index), start(index))[1]  # type: ignore[func-returns-value]
        engine.watch.end = lambda: (early.append(len(order)), end())[1]  # type: ignore[method-assign, func-returns-value]
        said = []
        for t in range(1, 4):
            order.clear()
            batch = tiny_batch(10 * t + engine.ctx.get_dp_rank(), m=5)
            said.append(repr(engine.train_step(batch, lr=1e-3, weight_decay=0.1, adam_t=t)))
            if t == 2:
                said.append(repr(engine.eval_loss(tiny_batch(99))))
        said.append(repr([float(state.double().sum()) for state in engine.state_shards().values()]))
        return said, digest(engine), order, early, engine.collective_seq


def stale_weights(ranks: Ranks, topology: Topology, dtype: str) -> list[bool]:
    """Each way to read weights right after a step whose gathers only move data when waited for."""
    with moving(When.AT_WAIT):
        engine = engine_on(ranks, topology, dtype=dtype)
        fresh = engine_on(ranks, topology, dtype=dtype)
        batch = tiny_batch(engine.ctx.get_dp_rank())
        engine.train_step(batch, lr=0.1, weight_decay=0.1, adam_t=1)
        held = engine.state_shards()
        for key, shard in fresh.state_shards().items():
            shard.copy_(held[key])
        fresh.sync_params_from_master()
        name = "model.layers.0.mlp.up_proj.weight"
        seen = [torch.equal(engine.optimizer.view(name)[0], fresh.optimizer.view(name)[0])]
        engine.train_step(batch, lr=0.1, weight_decay=0.1, adam_t=2)
        fresh.train_step(batch, lr=0.1, weight_decay=0.1, adam_t=2)
        seen.append(engine.eval_loss(batch) == fresh.eval_loss(batch))
        engine.train_step(batch, lr=0.1, weight_decay=0.1, adam_t=3)
        engine.init_weights()
        seen.append(digest(engine) == digest(engine_on(ranks, topology, dtype=dtype)))
        return seen
