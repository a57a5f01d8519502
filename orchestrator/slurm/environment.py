"""Which variables of the caller reach Slurm's commands; pure.

SBATCH_* variables beat the script's own `#SBATCH` lines, and a submission from inside a job inherits SLURM_*,
PMI and rendezvous variables of that job. Both have cost people days, so none of them pass. What tells the
commands where the controller is stays: without SLURM_CONF sbatch finds no cluster at all.
"""

from collections.abc import Mapping

_KEPT = frozenset({"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"})
_DROPPED_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
_DROPPED_PREFIXES_MPI = ("PMI_", "PMIX_", "PMI2_", "OMPI_COMM_", "TORCHELASTIC_", "PAWL_NONCE", "PAWL_NODE")
_DROPPED_NAMES = frozenset(
    {
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    }
)  # fmt: skip


def scrub_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without what an outer job, an srun shell or SBATCH_* would impose on a new job."""
    return {name: value for name, value in environ.items() if not _is_dropped(name)}


def _is_dropped(name: str) -> bool:
    if name in _KEPT:
        return False
    return name in _DROPPED_NAMES or name.startswith(_DROPPED_PREFIXES + _DROPPED_PREFIXES_MPI)
