"""A checkpoint → a folder that `transformers` loads, as a streaming read of the master boxes.

One tensor at a time is assembled, cast and written, so that the memory needed is that of the largest tensor and not of
the model, and no GPU or model code is involved. The checkpoint is verified first. The folder appears whole, by a
rename, or not at all.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.checkpoint.reader import BoxReader, Checkpoint, check_file, open_checkpoint
from trainer.checkpoint.tensorfile import ITEM_BYTES, write_tensors
from trainer.convert.fold import folded_factor, folding_note
from trainer.convert.hf_config import generation_config, hf_config
from trainer.convert.names import to_hf
from trainer.data.tokenizer import TOKENIZER_JSON, load_tokenizer, tokenizer_sha256
from trainer.errors import DataError, TrainerError
from trainer.fsio import write_atomic

MAX_SHARD_BYTES = 5_000_000_000

DTYPES: Mapping[str, str] = MappingProxyType({"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"})

TOKENIZER_FILES = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

CAST_ELEMENTS = 1 << 20

ProgressCall = Callable[[str, int, int], None]


class ConvertError(TrainerError):
    """A checkpoint cannot be brought into the asked format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export made. tokenizer: None where the folder has none, then `notes` says why."""

    path: Path
    step: int
    num_parameters: int
    num_bytes: int
    dtype: str
    tokenizer: Path | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    canonical: str
    hf: str
    shape: tuple[int, ...]
    num_bytes: int
    factor: float


def export_hf(
    checkpoint_dir: Path,
    out_dir: Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: ProgressCall | None = None,
) -> Exported:
    """Write the Hugging Face folder `out_dir`.

    dtype: of the weights (None: the run's compute dtype). tokenizer: its folder (None: the one the run names).
    progress: called with (tensor name, number from 1, of how many). Raises CheckpointInvalid if a file of the
    checkpoint is damaged, ConvertError if `out_dir` exists, the dtype is unknown, or the tokenizer is another one.
    """
    if out_dir.exists():
        raise ConvertError(f"{out_dir} exists. Choose another folder; an export overwrites nothing.")
    checkpoint = open_checkpoint(checkpoint_dir)
    model = checkpoint.manifest.model_config
    dtype = dtype or str(model["dtype"])
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    tensors = _tensors(checkpoint, DTYPES[dtype])
    for record in checkpoint.manifest.files:
        check_file(checkpoint_dir, record)
    found = _find_tokenizer(checkpoint, tokenizer)
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(checkpoint, tensors, partial, DTYPES[dtype], max_shard_bytes, progress or (lambda *_: None))
        for file in found.files:
            shutil.copyfile(file, partial / file.name)
        _write_json(partial / "config.json", hf_config(model, dtype=dtype, eos_id=found.eos_id))
        _write_json(partial / "generation_config.json", generation_config(model, eos_id=found.eos_id))
        partial.rename(out_dir)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConvertError(f"{out_dir} could not be written ({error}). Nothing of it was kept.") from error
    return Exported(
        path=out_dir,
        step=checkpoint.manifest.step,
        num_parameters=sum(tensor.num_bytes for tensor in tensors) // ITEM_BYTES[DTYPES[dtype]],
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        dtype=dtype,
        tokenizer=found.path,
        notes=tuple(note for note in (*found.notes, folding_note(model)) if note is not None),
    )


def _tensors(checkpoint: Checkpoint, dtype: str) -> tuple[_Tensor, ...]:
    model = checkpoint.manifest.model_config
    model_type = str(model["model_type"])
    try:
        return tuple(
            _Tensor(
                canonical=name,
                hf=to_hf(name, model_type),
                shape=tensor.shape,
                num_bytes=int(np.prod(tensor.shape)) * ITEM_BYTES[dtype],
                factor=folded_factor(name, model),
            )
            for name, tensor in checkpoint.index.tensors.items()
        )
    except KeyError as error:
        raise ConvertError(f"{checkpoint.path}: no Hugging Face name is known for {error} ({model_type}).") from error


def plan_shards(sizes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Consecutive runs of tensors that stay within `max_bytes`; a larger tensor gets a file of its own."""
    shards: list[range] = []
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > max_bytes:
            shards.append(range(start, i))
            start, total = i, 0
        total += size
    return (*shards, range(start, len(sizes)))


def _write_weights(
    checkpoint: Checkpoint,
    tensors: Sequence[_Tensor],
    out: Path,
    dtype: str,
    max_shard_bytes: int,
    progress: ProgressCall,
) -> None:
    reader = BoxReader(checkpoint)
    shards = plan_shards([tensor.num_bytes for tensor in tensors], max_shard_bytes)
    weight_map: dict[str, str] = {}

    def arrays(members: range) -> Iterator[NDArray[Any]]:
        for i in members:
            progress(tensors[i].hf, i + 1, len(tensors))
            values = reader.tensor(tensors[i].canonical)
            if tensors[i].factor != 1.0:
                values = values * tensors[i].factor  # not in place: it may be a map of the checkpoint's file
            yield cast(values, dtype)

    for number, members in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [(tensors[i].hf, dtype, tensors[i].shape) for i in members]
        write_tensors(out / name, entries, arrays(members), metadata={"format": "pt"})
        weight_map |= {tensors[i].hf: name for i in members}
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        _write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values in a safetensors dtype, rounded to nearest even; bfloat16 as uint16 bits. Memory: the result."""
    plain = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
    if dtype in plain:
        return values.astype(plain[dtype], copy=False)
    out = np.empty(values.shape, np.uint16)
    flat_in, flat_out = values.reshape(-1), out.reshape(-1)
    for start in range(0, flat_in.size, CAST_ELEMENTS):
        flat_out[start : start + CAST_ELEMENTS] = _bfloat16_bits(flat_in[start : start + CAST_ELEMENTS])
    return out


def _bfloat16_bits(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding may carry a NaN's mantissa into the exponent and make it infinite or negative zero; keep it a NaN.
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundTokenizer:
    path: Path | None = None
    files: tuple[Path, ...] = ()
    eos_id: int | None = None
    notes: tuple[str, ...] = ()


def _find_tokenizer(checkpoint: Checkpoint, given: Path | None) -> _FoundTokenizer:
    named = checkpoint.manifest.tokenizer
    if given is None and named is None:
        return _FoundTokenizer(notes=("the run names no tokenizer, so the folder has none; add one with --tokenizer",))
    path = given if given is not None else Path(str(named["path"] if named else ""))
    file = path / TOKENIZER_JSON if path.is_dir() else path
    if not file.is_file():
        if given is not None:
            raise ConvertError(f"--tokenizer {given}: there is no {TOKENIZER_JSON}.")
        return _FoundTokenizer(notes=(f"the run's tokenizer {path} is not on this machine; add it with --tokenizer",))
    recorded = named.get("sha256") if named else None
    if recorded is not None and recorded != tokenizer_sha256(file):
        raise ConvertError(
            f"{file} is not the tokenizer the run was trained with (its sha256 differs). "
            "Name the right one with --tokenizer."
        )
    files = tuple(file.parent / name for name in TOKENIZER_FILES if (file.parent / name).is_file())
    try:
        eos_id = load_tokenizer(path).eos_id
    except DataError as error:
        return _FoundTokenizer(path=path, files=files, notes=(f"no end token could be set: {error}",))
    return _FoundTokenizer(path=path, files=files, eos_id=eos_id)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(record, indent=2) + "\n")
