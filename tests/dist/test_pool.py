"""The pool of ranks: whatever a rank does, the call ends with the reason, and the next call works."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from dist.pool import Pool, RankError, Ranks

from trainer.mesh.topology import Topology

PAIR = Topology(dp=2)


def works(ranks: Ranks) -> float:
    x = torch.tensor([float(ranks.rank + 1)])
    dist.all_reduce(x, group=ranks.group((0, 1)))
    return float(x)


def misbehaves(ranks: Ranks, how: str) -> None:
    if how == "raises" and ranks.rank == 1:
        raise ValueError("told so")
    if how == "is killed" and ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    size = 5 if how == "other shape" and ranks.rank == 1 else 4
    dist.all_reduce(torch.ones(size), group=ranks.group((0, 1)))
    dist.all_reduce(torch.ones(4), group=ranks.group((0, 1)))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "told so"),
        ("is killed", "rank 1: died"),
        ("other shape", "rank [01]: "),
    ],
)
def test_a_fault_of_a_rank_is_told_and_the_next_call_works(how: str, says: str) -> None:
    """Where shapes differ gloo lets one rank go on as if all were well: the error of the other counts."""
    pool = Pool(2)
    try:
        with pytest.raises(RankError, match=says):
            pool.run(PAIR, misbehaves, how)
        assert pool.run(PAIR, works) == [3.0, 3.0]
    finally:
        pool.close()


def test_a_pool_grows_to_the_largest_mesh_and_keeps_what_it_has() -> None:
    pool = Pool()
    try:
        assert pool.run(Topology(), processes) and pool.size == 1
        first = pool.run(PAIR, processes)
        assert pool.size == 2 and pool.run(PAIR, processes) == first and pool.run(Topology(), processes) == first[:1]
    finally:
        pool.close()


def processes(ranks: Ranks) -> int:
    return os.getpid()
