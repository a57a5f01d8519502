"""Canonical tensors from what the ranks hold, and whatever should be equal between ranks and is not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dist.axes import Case, config_of
from dist.case import Pieces, RankRun

from trainer.spec import ParamSpec, local_box, local_shape, param_specs

Local = dict[tuple[str, int, int], np.ndarray]
"""(canonical name, pp rank, tp rank) → the local tensor, flat."""
Whole = dict[tuple[str, int], np.ndarray]
"""(canonical name, pp rank) → the canonical tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """Whole tensors as the ranks hold them; `faults` says which replicas or tied copies differ in a bit.

    Gradients and master weights come from the dp shards.
    """

    gradients: Whole
    masters: Whole
    faults: tuple[str, ...]


def assemble(case: Case, runs: Sequence[RankRun]) -> Assembled:
    """Put the dp shards of the gradients, then the tp shards of everything, side by side."""
    specs = {spec.name: spec for spec in param_specs(config_of(case), case.topology)}
    faults = list(_unequal_reports(runs))
    gradients = _join(case, specs, _from_shards(case, specs, [run.gradients for run in runs]), faults)
    masters = _join(case, specs, _from_shards(case, specs, [run.masters for run in runs]), faults)
    weights = _join(case, specs, _replicated(case, runs, faults), faults)
    for whole, what in ((gradients, "gradient"), (masters, "master of"), (weights, "weight")):
        faults += _unequal_copies(whole, what)
    faults += _unequal_casts(case, masters, weights)
    return Assembled(gradients=gradients, masters=masters, faults=tuple(faults))


def _unequal_reports(runs: Sequence[RankRun]) -> Iterator[str]:
    for rank, run in enumerate(runs):
        if run.steps != runs[0].steps or run.validation != runs[0].validation:
            yield f"rank {rank} reports other numbers than rank 0"


def _unequal_copies(whole: Whole, what: str) -> Iterator[str]:
    """Tied tensors are held by several stages: the bits must agree."""
    first: dict[str, np.ndarray] = {}
    for (name, stage), values in whole.items():
        if not np.array_equal(first.setdefault(name, values), values):
            yield f"{what} {name} on stage {stage} is not bit for bit that of another stage"


def _unequal_casts(case: Case, masters: Whole, weights: Whole) -> Iterator[str]:
    """Live weights are the master weights in the compute dtype."""
    for key, live in weights.items():
        cast = torch.from_numpy(masters[key]).to(getattr(torch, case["dtype"])).double().numpy()
        if not np.array_equal(cast, live):
            yield f"weight {key[0]} on stage {key[1]} is not its master in {case['dtype']}"


def _from_shards(case: Case, specs: dict[str, ParamSpec], ranks: Sequence[Pieces]) -> Local:
    local: Local = {}
    for rank, pieces in enumerate(ranks):
        at = case.topology.coord(rank)
        for name, start, values in pieces:
            numel = int(np.prod(local_shape(specs[name], case.tp, at.tp)))
            target = local.setdefault((name, at.pp, at.tp), np.full(numel, np.nan))
            target[start : start + len(values)] = values
    return local


def _replicated(case: Case, runs: Sequence[RankRun], faults: list[str]) -> Local:
    local: Local = {}
    for rank, run in enumerate(runs):
        at = case.topology.coord(rank)
        for name, values in run.weights.items():
            if not np.array_equal(local.setdefault((name, at.pp, at.tp), values), values):
                faults.append(f"weight {name} differs between dp replicas, seen on rank {rank}")
    return local


def _join(case: Case, specs: dict[str, ParamSpec], local: Local, faults: list[str]) -> Whole:
    """tp shards side by side, padding cut off; a tensor that is whole on every tp rank must be equal on all."""
    whole: Whole = {}
    for (name, stage, tp_rank), values in local.items():
        spec = specs[name]
        box = local_box(spec, case.tp, tp_rank)
        part = values.reshape(local_shape(spec, case.tp, tp_rank))[tuple(slice(n) for n in box.size)]
        target = whole.setdefault((name, stage), np.full(spec.shape, np.nan))
        where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        if np.count_nonzero(values) != np.count_nonzero(part):
            faults.append(f"padding rows of {name} on tp rank {tp_rank} of stage {stage} are not zero")
        if spec.shard_dim is None and tp_rank and not np.array_equal(target, part):
            faults.append(f"{name} differs between tp rank {tp_rank} and others on stage {stage}")
        target[where] = part
    return whole
