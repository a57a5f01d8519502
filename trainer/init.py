"""Initial weights that do not depend on the mesh.

Row r of a canonical tensor is numpy Philox with key (hash(seed, name), r), drawn on the CPU in fp32. A rank draws the
rows it owns and cuts their columns, so every layout starts from bitwise the same model, and no generator state has to
be saved anywhere. (Drawing a shard from a per-rank seed is a classic silent error: tensor-parallel shards come out
equal, or the standard deviation changes with tp.)
"""

import hashlib

import numpy as np
import numpy.typing as npt

from trainer.spec import Box, InitKind, ParamSpec


def tensor_key(seed: int, name: str) -> int:
    """64-bit key of one canonical tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def draw_box(spec: ParamSpec, box: Box, *, seed: int) -> npt.NDArray[np.float32]:
    """The initial values of `box` of the canonical tensor, fp32, shape `box.size`."""
    if spec.init.kind is not InitKind.NORMAL:
        return np.full(box.size, 1.0 if spec.init.kind is InitKind.ONES else 0.0, dtype=np.float32)
    key = tensor_key(seed, spec.name)
    columns = spec.shape[1]
    cut = slice(box.offset[1], box.offset[1] + box.size[1])
    out = np.empty(box.size, dtype=np.float32)
    # A fresh generator given another key is that key's generator; one made anew for each row costs half as much again.
    philox = np.random.Philox(key=[key, 0])
    generator, fresh = np.random.Generator(philox), philox.state
    for index in range(box.size[0]):
        fresh["state"]["key"][1] = box.offset[0] + index
        philox.state = fresh
        out[index] = generator.standard_normal(columns, dtype=np.float32)[cut]
    out *= np.float32(spec.init.std)
    return out
