"""A whole mesh in one process: every rank's flat buckets, filled with values that say which element they are.

Element i of state s of tensor t holds a number that depends on (s, t, i) alone. So after a save on one mesh and a load
on another, a rank that reads a wrong tensor, a wrong row, or the padding shows it.
"""

import math
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from trainer.checkpoint.naming import CheckpointName, partial_name
from trainer.checkpoint.plan import held_boxes, view
from trainer.checkpoint.save import Facts, begin, commit, write_rank
from trainer.checkpoint.shards import RankShards
from trainer.checkpoint.state import RunState
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES, plan_rank_layout
from trainer.pipeline.schedule import Placement
from trainer.spec import Init, InitKind, ParamSpec

VOCAB, HIDDEN, FFN, LAYERS = 13, 8, 12, 3
"""A vocabulary that no tp > 1 divides, so that padding exists; buckets below cut tensors in mid-row."""

BUCKET_NUMEL = 200


def make_specs(topology: Topology, *, tied: bool, placement: Placement | None = None) -> tuple[ParamSpec, ...]:
    """A small decoder with every kind of tensor: padded and cut by rows, cut by rows, by columns, not cut, tied."""
    placement = Placement.loop(topology.pp) if placement is None else placement
    last = placement.num_stages - 1
    spec_of = partial(make_spec, topology.tp, placement)
    stages = tuple(dict.fromkeys((0, last))) if tied else (0,)
    specs = [spec_of("model.embed_tokens.weight", (VOCAB, HIDDEN), 0, stages)]
    for layer in range(LAYERS):
        stage = min(layer, last)
        prefix = f"model.layers.{layer}"
        specs += [
            spec_of(f"{prefix}.input_layernorm.weight", (HIDDEN,), None, (stage,)),
            spec_of(f"{prefix}.mlp.gate_proj.weight", (FFN, HIDDEN), 0, (stage,)),
            spec_of(f"{prefix}.mlp.down_proj.weight", (HIDDEN, FFN), 1, (stage,)),
        ]
    specs.append(spec_of("model.norm.weight", (HIDDEN,), None, (last,)))
    if not tied:
        specs.append(spec_of("lm_head.weight", (VOCAB, HIDDEN), 0, (last,)))
    return tuple(specs)


def make_spec(
    tp: int, placement: Placement, name: str, shape: tuple[int, ...], shard_dim: int | None, stages: tuple[int, ...]
) -> ParamSpec:
    padded = tuple(-(-n // tp) * tp if dim == shard_dim else n for dim, n in enumerate(shape))
    return ParamSpec(
        name=name,
        shape=shape,
        padded_shape=padded,
        shard_dim=shard_dim,
        stages=stages,
        pp_ranks=tuple(dict.fromkeys(placement.ranks[stage] for stage in stages)),
        init=Init(kind=InitKind.NORMAL, std=0.02),
        wd_mult=float(len(shape) > 1),
        fan_in=shape[-1],
        fan_out=shape[0],
    )


def expected(state: str, spec: ParamSpec) -> torch.Tensor:
    """What the whole canonical tensor holds: a hash of the state's name, the tensor's and the element's number.

    Its 24 bits are the sign and the fraction of a number of size 1 to 2.
    """
    with np.errstate(over="ignore"):
        bits = np.arange(math.prod(spec.shape), dtype=np.uint64) + np.uint64(
            zlib.crc32(f"{state}/{spec.name}".encode())
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64's finish
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    number = (bits & np.uint64(0x807FFFFF) | np.uint64(0x3F800000)).astype(np.uint32).view(np.float32)
    return torch.from_numpy(number.reshape(spec.shape))


def empty_rank(
    specs: Sequence[ParamSpec], topology: Topology, rank: int, *, zero_stage: int, bucket_numel: int = BUCKET_NUMEL
) -> RankShards:
    """A rank whose storage holds a value no tensor has, so that anything not written to is seen."""
    layout_of = partial(plan_rank_layout, specs, topology, bucket_numel=bucket_numel)
    return RankShards(
        specs=specs,
        topology=topology,
        layout_of=layout_of,
        rank=rank,
        zero_stage=zero_stage,
        tensors={
            (state, bucket.index): torch.full((bucket.shard_numel if zero_stage else bucket.numel,), -7.0)
            for bucket in layout_of(rank).buckets
            for state in STATES
        },
    )


def filled_rank(
    specs: Sequence[ParamSpec], topology: Topology, rank: int, *, zero_stage: int, bucket_numel: int = BUCKET_NUMEL
) -> RankShards:
    """A rank as it would be in training: every element tagged, padding and gaps zero."""
    shards = empty_rank(specs, topology, rank, zero_stage=zero_stage, bucket_numel=bucket_numel)
    for tensor in shards.tensors.values():
        tensor.zero_()
    by_name = {spec.name: spec for spec in specs}
    for piece in held_boxes(specs, shards.layout, topology, rank, zero_stage):
        cells = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.size, strict=True))
        for state in STATES:
            view(shards.tensors[state, piece.bucket], piece).copy_(expected(state, by_name[piece.name])[cells])
    return shards


def facts(name: CheckpointName, *, state: RunState | None = None) -> Facts:
    return Facts(
        run="test",
        name=name,
        state=RunState(step=name.step, consumed_samples=8 * name.step) if state is None else state,
        config_text="general: {}\n",
        model_config={"model_type": "llama"},
        tokenizer=None,
    )


def save_world(
    directory: Path, specs: Sequence[ParamSpec], topology: Topology, *, step: int = 40, zero_stage: int = 1,
    epoch: tuple[int, int, int] = (1, 1, 1), bucket_numel: int = BUCKET_NUMEL,
) -> Path:  # fmt: skip
    """Save as all ranks of a mesh would, one after the other; returns the committed folder."""
    name = CheckpointName(step, epoch)
    final, partial_dir = directory / str(name), directory / partial_name(name)
    ranks = [
        filled_rank(specs, topology, rank, zero_stage=zero_stage, bucket_numel=bucket_numel)
        for rank in range(topology.world_size)
    ]
    begin(final, partial_dir)
    files = [write_rank(partial_dir, shards) for shards in ranks]
    commit(
        partial_dir, final, ranks[0], facts(name), [{"name": f.name, "bytes": f.bytes, "xxh3": f.xxh3} for f in files]
    )
    return final


def flip_byte(path: Path, at: int) -> None:
    """Change one bit of one byte of a file in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def assert_filled(shards: RankShards, right: RankShards | None = None) -> None:
    """Every stored element is bit for bit what training would have there (`right`: a filled rank), padding zero."""
    if right is None:
        right = filled_rank(shards.specs, shards.topology, shards.rank, zero_stage=shards.zero_stage)
    for key, tensor in shards.tensors.items():
        have, want = tensor.numpy().view(np.uint32), right.tensors[key].numpy().view(np.uint32)
        np.testing.assert_array_equal(have, want, err_msg=str(key))
