"""The one module that names devices, communication backends and dtypes; everything else is given them.

Three dtypes: *compute* (activations, matrix products, live weights), *grad* (accumulation buffers) and *master* (what
the optimizer updates). float32 and float64 weights are their own master; bfloat16 keeps fp32 gradients and fp32 master.
"""

from dataclasses import dataclass

import torch

from trainer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The three dtypes of a run."""

    compute: torch.dtype
    grad: torch.dtype
    master: torch.dtype

    @property
    def is_own_master(self) -> bool:
        """Whether the live weights are what the optimizer updates."""
        return self.compute == self.master


_PRECISIONS = {
    "bfloat16": Precision(compute=torch.bfloat16, grad=torch.float32, master=torch.float32),
    "float32": Precision(compute=torch.float32, grad=torch.float32, master=torch.float32),
    "float64": Precision(compute=torch.float64, grad=torch.float64, master=torch.float64),
}


def precision(name: str) -> Precision:
    """The dtypes for a config's `model.dtype`. Raises ConfigError for a name it does not know."""
    if name not in _PRECISIONS:
        raise ConfigError(f"model.dtype is {name!r}; set one of {', '.join(_PRECISIONS)}.")
    return _PRECISIONS[name]


def pick_device(local_rank: int) -> torch.device:
    """The accelerator with this node-local index where there is one, else the CPU.

    Raises ConfigError when there are accelerators, but fewer than ranks on this node.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this node shows {count} (CUDA_VISIBLE_DEVICES). "
            "Start at most one rank per GPU, or hide the GPUs to train on the CPU."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """The communication backend for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def has_native_reduce_scatter(device: torch.device) -> bool:
    """Whether to use the backend's own reduce-scatter; gloo's is slow and depends on bucket sizes bitwise."""
    return device.type == "cuda"


def memory_bytes(device: torch.device) -> tuple[int, int] | None:
    """(allocated, peak) bytes of this process on an accelerator; None on a CPU, which has no such counter."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def statistics_dtype(compute: torch.dtype) -> torch.dtype:
    """Where sums over many elements are taken inside layers: at least float32."""
    return torch.promote_types(compute, torch.float32)


def device_name(device: torch.device) -> str | None:
    """The vendor's name of an accelerator, such as 'NVIDIA H100 80GB HBM3'; None on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def host_buffer(numel: int, *, dtype: torch.dtype, source: torch.device) -> torch.Tensor:
    """Flat host memory to copy into from `source`, pinned where that is an accelerator; every page is there already."""
    return torch.empty(numel, dtype=dtype, pin_memory=source.type == "cuda").zero_()


def wait_for_copies(source: torch.device) -> None:
    """Until what was copied from `source` without waiting has arrived."""
    if source.type == "cuda":
        torch.cuda.current_stream(source).synchronize()
