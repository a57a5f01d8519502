"""In what two checkpoints differ: config, mesh, step, and every tensor, one after the other. No torch.

Tensors are canonical, so two checkpoints of any two meshes can be compared. At most one tensor of each is in memory,
and what is computed from it is computed piece by piece in fp64.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint.reader import BoxReader, Checkpoint
from trainer.config.typed import walk
from trainer.config.yaml_loader import parse_text
from trainer.inspect import config_text

SHOWN = 20
_PIECE = 1 << 22


def differences(one: Checkpoint, other: Checkpoint) -> dict[str, Any]:
    """Everything that differs, as plain values; numbers that are not finite are None and counted.

    tensors: {name, state, max_abs, relative, nonfinite} of each differing (tensor, state), largest `relative` first;
    relative = ‖other − one‖ / ‖one‖ in the Frobenius norm, None where ‖one‖ is 0.
    """
    here, there = one.index.tensors, other.index.tensors
    both = sorted(here.keys() & there.keys())
    reshaped = [name for name in both if here[name].shape != there[name].shape]
    rows, num_compared = [], 0
    readers = BoxReader(one), BoxReader(other)
    for name in both:
        if name in reshaped:
            continue
        for state in sorted(here[name].states.keys() & there[name].states.keys()):
            dtypes = here[name].states[state], there[name].states[state]
            values = (reader.tensor(name, state) for reader in readers)
            found = compare(*(_numbers(array, dtype) for array, dtype in zip(values, dtypes, strict=True)))
            num_compared += 1
            if found is not None:
                rows.append({"name": name, "state": state, **found})
    return {
        "one": _side(one),
        "other": _side(other),
        "config": [list(line) for line in config_lines(one, other)],
        "added": sorted(there.keys() - here.keys()),
        "removed": sorted(here.keys() - there.keys()),
        "reshaped": [{"name": n, "one": list(here[n].shape), "other": list(there[n].shape)} for n in reshaped],
        "num_compared": num_compared,
        "tensors": sorted(rows, key=_largest_first),
    }


def compare(one: NDArray[Any], other: NDArray[Any]) -> dict[str, Any] | None:
    """max |Δ| and relative norm over the elements that are finite in both; None where every value is the same."""
    flat, other_flat = one.reshape(-1), other.reshape(-1)
    largest, squares, norm, nonfinite, is_equal = 0.0, 0.0, 0.0, 0, True
    for start in range(0, flat.size, _PIECE):
        a = flat[start : start + _PIECE].astype(np.float64)
        b = other_flat[start : start + _PIECE].astype(np.float64)
        if np.array_equal(a, b, equal_nan=True):
            norm += float(np.square(a[np.isfinite(a)]).sum())
            continue
        is_equal = False
        finite = np.isfinite(a) & np.isfinite(b)
        nonfinite += int(a.size - finite.sum())
        delta = np.abs(b[finite] - a[finite])
        largest = max(largest, float(delta.max(initial=0.0)))
        squares += float(np.square(delta).sum())
        norm += float(np.square(a[finite]).sum())
    if is_equal:
        return None
    relative = math.sqrt(squares / norm) if norm > 0 else None
    return {"max_abs": largest, "relative": relative, "nonfinite": nonfinite}


def _numbers(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values as floats: numpy has no bfloat16, whose bits are the upper half of an fp32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def _largest_first(row: dict[str, Any]) -> tuple[bool, float, str]:
    return (row["nonfinite"] == 0, -math.inf if row["relative"] is None else -row["relative"], row["name"])


def _side(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest, index = checkpoint.manifest, checkpoint.index
    return {
        "path": str(checkpoint.path),
        "run": manifest.run,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "mesh": dict(index.mesh),
        "state": manifest.state.to_json(),
    }


def config_lines(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, str | None, str | None]]:
    """(key, value here, value there) of each value of the configs that differs; None: not given."""
    here, there = _values(one), _values(other)
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            yield key, here.get(key), there.get(key)


def _values(checkpoint: Checkpoint) -> dict[str, str]:
    text = config_text(checkpoint)
    if text is None:
        return {}
    return {key: node.text for key, node in walk(parse_text(text, file="config.yaml").root)}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The differences for a person."""
    for label, side in (("A", found["one"]), ("B", found["other"])):
        mesh = " ".join(f"{axis}={size}" for axis, size in side["mesh"].items())
        yield f"{label}  {side['path']}: run {side['run']}, step {side['step']:,}, {mesh}"
    yield "config: the same" if not found["config"] else "config, A → B:"
    yield from (f"  {key}: {_given(a)} → {_given(b)}" for key, a, b in found["config"])
    for word in ("removed", "added"):
        yield from (f"tensor {word}: {name}" for name in found[word])
    for row in found["reshaped"]:
        yield f"tensor of another shape: {row['name']}: {row['one']} → {row['other']}"
    rows = found["tensors"]
    if not rows:
        yield f"all {found['num_compared']} tensors (states counted apart) have the same values"
        return
    yield f"{len(rows)} of {found['num_compared']} tensors (states counted apart) differ, largest first:"
    width = max(len(row["name"]) for row in rows[:SHOWN])
    yield f"  {'tensor':<{width}}  {'state':<10}  {'max |Δ|':>9}  {'‖Δ‖/‖A‖':>9}"
    for row in rows[:SHOWN]:
        relative = "—" if row["relative"] is None else f"{row['relative']:.3g}"
        odd = f"  {row['nonfinite']:,} not finite" if row["nonfinite"] else ""
        yield f"  {row['name']:<{width}}  {row['state']:<10}  {row['max_abs']:>9.3g}  {relative:>9}{odd}"
    if len(rows) > SHOWN:
        yield f"  and {len(rows) - SHOWN} more (--json lists all)"


def _given(value: str | None) -> str:
    return "not given" if value is None else value
