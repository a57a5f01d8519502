"""ParallelContext: the mesh with live process groups. Made once per process and passed in, never global.

Process groups come from a factory, so that a pool of test ranks can reuse groups that were made for an earlier mesh.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainer.comm import Counter, Group
from trainer.device import backend, pick_device
from trainer.errors import ConfigError
from trainer.mesh.topology import Axis, Coord, Topology

GroupFactory = Callable[[tuple[int, ...]], dist.ProcessGroup | None]


def check_world_size(topology: Topology, world_size: int) -> None:
    """Raises ConfigError with all the numbers unless the launch has exactly the ranks the mesh needs."""
    if world_size == topology.world_size:
        return
    t = topology
    raise ConfigError(
        f"this launch has {world_size} ranks, but the mesh needs dp · pp · cp · tp = {t.dp} · {t.pp} · {t.cp} · {t.tp} "
        f"= {t.world_size}. Start {t.world_size} ranks (nodes × ranks per node), or change parallelism in the config."
    )


def init_process_group(
    topology: Topology, *, prefix: str, timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Join the world that torchrun's environment describes; a world of one joins nothing.

    `prefix` must be new for each launch: torchrun keeps one store over restarts, and ranks that find keys of a dead
    generation dial dead addresses and hang (pytorch issue 135712). Raises ConfigError on a wrong world size or a
    missing variable before any connection, so every rank says it at once.
    """
    env = os.environ if env is None else env
    world_size, rank = int(env.get("WORLD_SIZE", "1")), int(env.get("RANK", "0"))
    check_world_size(topology, world_size)
    if world_size == 1:
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world_size}, but {', '.join(missing)} is not set: ranks cannot find each other. Start "
            "them with torchrun, which sets all of these."
        )
    timeout = timedelta(seconds=timeout_s)
    # torchrun keeps the store, unless it is told not to or another launcher set the variables: then rank 0 does.
    is_host = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(
        env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=is_host, wait_for_workers=False, timeout=timeout
    )
    dist.init_process_group(
        backend(pick_device(int(env.get("LOCAL_RANK", "0")))),
        store=PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


class ParallelContext:
    """This rank's place on the mesh and the groups it belongs to.

    The groups `dp`, `pp`, `tp`, `world` are `comm.Group`s; `tp_pg`, `pp_pg`, `dp_pg` the bare process groups (None for
    a group of one). `collectives` counts communication calls.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        rank: int | None = None,
        device: torch.device | None = None,
        group_factory: GroupFactory | None = None,
    ) -> None:
        """Make all groups of the mesh. Comm: collective over the world; every rank makes all groups in one order.

        Raises ConfigError if the process group's size is not the mesh's.
        """
        joined = dist.is_available() and dist.is_initialized()
        self.topology = topology
        self.rank = (dist.get_rank() if joined else 0) if rank is None else rank
        if group_factory is None:
            check_world_size(topology, dist.get_world_size() if joined else 1)
            group_factory = _new_group
        self.device = pick_device(int(os.environ.get("LOCAL_RANK", "0"))) if device is None else device
        self.coord: Coord = topology.coord(self.rank)
        self.collectives = Counter()
        self.world = self._group(tuple(range(topology.world_size)), group_factory)
        self.dp, self.pp, self.tp = (self._axis(axis, group_factory) for axis in (Axis.DP, Axis.PP, Axis.TP))
        self.dp_pg, self.pp_pg, self.tp_pg = self.dp.pg, self.pp.pg, self.tp.pg

    def _axis(self, axis: Axis, factory: GroupFactory) -> Group:
        mine = [
            g for g in (self._group(ranks, factory) for ranks in self.topology.groups(axis)) if self.rank in g.ranks
        ]
        return mine[0]

    def _group(self, ranks: tuple[int, ...], factory: GroupFactory) -> Group:
        pg = factory(ranks) if len(ranks) > 1 else None
        rank = ranks.index(self.rank) if self.rank in ranks else -1
        return Group(ranks=ranks, rank=rank, pg=pg, counter=self.collectives)

    @property
    def world_rank_matrix(self) -> npt.NDArray[np.int64]:
        """Global ranks, shape (dp, pp, tp)."""
        return self.topology.world_rank_matrix

    @property
    def collective_seq(self) -> int:
        """Communication calls made so far."""
        return self.collectives.value

    def get_dp_rank(self) -> int:
        return self.coord.dp

    def get_pp_rank(self) -> int:
        return self.coord.pp

    def get_tp_rank(self) -> int:
        return self.coord.tp

    def get_dp_world_size(self) -> int:
        return self.topology.dp

    def get_pp_world_size(self) -> int:
        return self.topology.pp

    def get_tp_world_size(self) -> int:
        return self.topology.tp

    def get_prev_pp_rank(self) -> int | None:
        """Global rank of the stage before this one; None on the first."""
        return self.pp.ranks[self.coord.pp - 1] if self.coord.pp > 0 else None

    def get_next_pp_rank(self) -> int | None:
        """Global rank of the stage after this one; None on the last."""
        return self.pp.ranks[self.coord.pp + 1] if self.coord.pp + 1 < self.topology.pp else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """All ranks, for one thread beside the step's: a group of its own, since collectives of two threads on one would
    meet each other's. They are not counted: the beat's number tells where the step is.
    """

    world: Group

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def background_of(context: ParallelContext, *, factory: GroupFactory | None = None) -> Background:
    """Make the group, over gloo: its messages are on the host. Comm: collective over the world, once per process."""
    ranks = context.world.ranks
    make = _new_gloo if factory is None else factory
    return Background(world=Group(ranks=ranks, rank=context.rank, pg=make(ranks) if len(ranks) > 1 else None))


def _new_gloo(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    return dist.new_group(list(ranks), backend="gloo")  # type: ignore[no-any-return]


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The world's own group where the ranks are all ranks, else a new one."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(ranks))  # type: ignore[no-any-return]
