"""Rank arithmetic: R = tp + TP·(cp + CP·(pp + PP·dp)), groups as slices of one array."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.mesh import context as context_module
from trainer.mesh.cli import render
from trainer.mesh.context import ParallelContext, check_world_size, init_process_group
from trainer.mesh.topology import Axis, Coord, Topology

sizes = st.integers(1, 4)
meshes = st.builds(Topology, dp=sizes, pp=sizes, tp=sizes, cp=sizes)


@given(meshes)
@settings(max_examples=50, deadline=None)
def test_rank_formula_and_inverse(t: Topology) -> None:
    for rank in range(t.world_size):
        at = t.coord(rank)
        assert rank == at.tp + t.tp * (at.cp + t.cp * (at.pp + t.pp * at.dp)) == t.rank(at)


@given(meshes)
@settings(max_examples=50, deadline=None)
def test_groups_of_an_axis_cover_every_rank_once(t: Topology) -> None:
    for axis in Axis:
        groups = t.groups(axis)
        assert sorted(r for group in groups for r in group) == list(range(t.world_size))
        for group in groups:
            assert len(group) == t.size(axis) and all(t.ranks_along(axis, r) == group for r in group)


def test_seed_example() -> None:
    t = Topology(dp=2, pp=2, tp=2)
    assert t.world_rank_matrix.shape == (2, 2, 2)
    assert np.array_equal(t.world_rank_matrix.ravel(), np.arange(8))
    assert t.coord(5) == Coord(dp=1, pp=0, tp=1)
    assert t.ranks_along("dp", 1) == (1, 5) and t.ranks_along("pp", 1) == (1, 3) and t.ranks_along("tp", 1) == (0, 1)


def test_bad_sizes_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="axis tp has size 0"):
        Topology(tp=0)
    with pytest.raises(ValueError, match="rank 4 is outside the mesh of 4"):
        Topology(dp=4).coord(4)


def test_wrong_world_size_names_all_numbers_before_any_connection() -> None:
    """S8 (pytorch-lightning#20391)."""
    with pytest.raises(ConfigError, match=r"3 ranks.*2 · 2 · 1 · 1 = 4"):
        check_world_size(Topology(dp=2, pp=2), 3)
    env = {"WORLD_SIZE": "3", "RANK": "1"}  # no MASTER_ADDR: connecting would be a KeyError
    with pytest.raises(ConfigError, match="3 ranks"):
        init_process_group(Topology(dp=2), prefix="x", timeout_s=1, env=env)
    with pytest.raises(ConfigError, match="1 ranks"):
        ParallelContext(Topology(dp=2))


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launch_without_torchruns_variables_is_refused_before_any_connection(name: str) -> None:
    env = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    del env[name]
    with pytest.raises(ConfigError, match=f"WORLD_SIZE is 2, but {name} is not set.*torchrun"):
        init_process_group(Topology(dp=2), prefix="x", timeout_s=1.0, env=env)


@pytest.mark.parametrize(
    ("rank", "keeps", "hosts"), [("0", "True", False), ("0", "False", True), ("1", "False", False)]
)
def test_the_process_group_meets_in_the_launchers_store_under_its_own_prefix(
    rank: str, keeps: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch#135712: torchrun's store outlives a restart, and the keys of the dead group are still in it."""
    shared, asked, joined = torch.distributed.HashStore(), [], []
    monkeypatch.setattr(context_module, "TCPStore", lambda *_, **named: (asked.append(named["is_master"]), shared)[1])
    monkeypatch.setattr(context_module, "pick_device", lambda local_rank: torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **named: joined.append((args, named)))
    env = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    init_process_group(
        Topology(dp=2), prefix="pawl/a0001g01c0002", timeout_s=1.0, env={**env, "TORCHELASTIC_USE_AGENT_STORE": keeps}
    )
    (((backend,), named),) = joined
    assert (backend, named["rank"], named["world_size"]) == ("gloo", int(rank), 2)
    named["store"].set("key", "value")
    assert shared.check(["pawl/a0001g01c0002/key"])
    assert asked == [hosts], "where nobody keeps a store, all ranks would wait for one half an hour"


def test_neighbours_are_global_ranks_or_none() -> None:
    t = Topology(dp=2, pp=3, tp=2)
    for rank in range(t.world_size):
        ctx = ParallelContext(t, rank=rank, group_factory=lambda ranks: None)
        at = t.coord(rank)
        assert (ctx.get_dp_rank(), ctx.get_pp_rank(), ctx.get_tp_rank()) == (at.dp, at.pp, at.tp)
        assert ctx.get_prev_pp_rank() == (rank - 2 if at.pp > 0 else None)
        assert ctx.get_next_pp_rank() == (rank + 2 if at.pp < 2 else None)
    assert (ctx.get_dp_world_size(), ctx.get_pp_world_size(), ctx.get_tp_world_size()) == (2, 3, 2)


def test_mesh_table_names_nodes_and_groups() -> None:
    text = render(Topology(dp=2, pp=2, tp=2), 4)
    assert "8 ranks = dp 2 · pp 2 · tp 2" in text
    assert text.splitlines()[-1].split() == ["7", "1", "1", "1", "1", "[6,", "7]", "·", "[5,", "7]", "·", "[3,", "7]"]
