"""Two things ranks do together outside a step: believe what rank 0 sees, and part without tearing each other down."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainer.checkpoint.together import together
from trainer.mesh.context import ParallelContext

FAREWELL_S = 10.0


def agree(context: ParallelContext, look: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The small JSON object that rank 0 gets from `look`, on every rank. Comm: 1 all-gather of a kilobyte (world).

    A shared file system may show each node something else for a while, so only one rank looks and the others are told.
    If the look fails, every rank raises: one that failed alone would leave the others waiting.
    """
    return together(context, look if context.rank == 0 else dict)[0]


def wait_for_peers(prefix: str, world_size: int, *, env: Mapping[str, str] = os.environ) -> bool:
    """Wait up to ten seconds until all ranks have come here; whether they have.

    torchrun ends all other ranks of a node as soon as one exits with a code that is not 0, and a drained rank exits
    with 75: without this the slower ones would die before they have left their outcome. The store is torchrun's own,
    so it outlives every rank; a rank that is missing costs ten seconds, never a hang.
    """
    if world_size == 1 or "TORCHELASTIC_RUN_ID" not in env:
        return True
    timeout = timedelta(seconds=FAREWELL_S)
    try:
        store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=timeout)
        farewell = PrefixStore(f"{prefix}/farewell", store)
        if farewell.add("left", 1) == world_size:
            farewell.set("all", "1")
        farewell.wait(["all"], timeout)
    except RuntimeError:  # DistStoreError, DistNetworkError: a peer or the store is gone
        return False
    return True
