"""Can this node train? Cheap questions before a cycle starts here; the answer is a defect in one sentence, or None.

Looking costs milliseconds, so every agent asks before every cycle. What needs a GPU or a network partner is not asked.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent import proc
from orchestrator.words import plural

SHM_BYTES = 16 * 1024 * 1024
DISK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What was found: free bytes (None: could not be asked), CPUs this process may use, processes left over."""

    shm_free_bytes: int | None
    disk_free_bytes: int | None
    num_cpus: int
    strays: int


def look(run_dir: Path, *, nonce: str, node: str) -> NodeFacts:
    """Ask the machine."""
    return NodeFacts(
        shm_free_bytes=_free(Path("/dev/shm")),
        disk_free_bytes=_free(run_dir),
        num_cpus=len(os.sched_getaffinity(0)),
        strays=len(proc.find(nonce=nonce, node=node)),
    )


def judge(facts: NodeFacts, *, run_dir: Path) -> str | None:
    """Why this node must not train, or None. Unknown free space is no defect."""
    if facts.shm_free_bytes is not None and facts.shm_free_bytes < SHM_BYTES:
        return f"/dev/shm has only {facts.shm_free_bytes} bytes free; ranks and their libraries need some of it."
    if facts.disk_free_bytes is not None and facts.disk_free_bytes < DISK_BYTES:
        return f"{run_dir} has only {facts.disk_free_bytes} bytes free; checkpoints and logs would not fit."
    if facts.strays:
        return f"{plural(facts.strays, 'process', 'processes')} of this attempt cannot be killed and stay here."
    return None


def advice(facts: NodeFacts, *, ranks_per_node: int) -> str | None:
    """What is legal but slow: fewer CPUs than ranks (S6)."""
    if facts.num_cpus < ranks_per_node:
        return (
            f"{plural(ranks_per_node, 'rank')} share {plural(facts.num_cpus, 'CPU')}: check slurm.cpus_per_task and "
            "the step's affinity."
        )
    return None


def _free(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
