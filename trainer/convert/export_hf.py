"""A checkpoint → a folder that `transformers` loads, as a streaming read of the master boxes.

One tensor at a time is assembled, cast and written, so that the memory needed is that of the largest tensor and not of
the model, and no GPU or model code is involved. The checkpoint is verified first. The folder appears whole, by a
rename, or not at all.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from trainer.checkpoint.naming import CONFIG
from trainer.checkpoint.reader import BoxReader, Checkpoint, check_file, open_checkpoint
from trainer.checkpoint.tensorfile import ITEM_BYTES, write_tensors
from trainer.config.typed import child_of
from trainer.config.yaml_loader import Node, Scalar, load_file
from trainer.convert.cast import cast
from trainer.convert.fold import folded_factor, folding_note
from trainer.convert.hf_config import generation_config, hf_config
from trainer.convert.hf_folder import INDEX_FILE, ONE_FILE, dumps
from trainer.convert.hf_model import CONFIG_JSON, ConvertError
from trainer.convert.names import to_hf
from trainer.convert.shards import MAX_SHARD_BYTES, plan_shards
from trainer.convert.tokenizer_files import GENERATION_JSON, FoundTokenizer, find_tokenizer
from trainer.fsio import write_atomic

DTYPES: Mapping[str, str] = MappingProxyType({"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"})

ProgressCall = Callable[[str, int, int], None]


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
    """source, dtype: safetensors dtypes in the checkpoint and in the folder."""

    canonical: str
    hf: str
    shape: tuple[int, ...]
    source: str
    dtype: str
    factor: float

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


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

    dtype: of the weights (None: the run's compute dtype; of an imported model, each tensor's own). tokenizer: its
    folder (None: the one the run names). progress: called with (tensor name, number from 1, of how many). Raises
    CheckpointInvalid if a file of the checkpoint is damaged, ConvertError if `out_dir` exists, the dtype is unknown,
    or the tokenizer is another one.
    """
    if out_dir.exists():
        raise ConvertError(f"{out_dir} exists. Choose another folder; an export overwrites nothing.")
    checkpoint = open_checkpoint(checkpoint_dir)
    model = checkpoint.manifest.model_config
    as_saved = dtype is None and "source" in model
    dtype = dtype or str(model["dtype"])
    if dtype not in DTYPES:
        raise ConvertError(f"dtype {dtype!r} is not known; choose one of {', '.join(DTYPES)}.")
    tensors = _tensors(checkpoint, None if as_saved else DTYPES[dtype])
    for record in checkpoint.manifest.files:
        check_file(checkpoint_dir, record)
    found = find_tokenizer(checkpoint, tokenizer)
    partial = out_dir.with_name(f".{out_dir.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_weights(checkpoint, tensors, partial, max_shard_bytes, progress or (lambda *_: None))
        _write_facts(checkpoint, partial, found, dtype)
        partial.rename(out_dir)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConvertError(f"{out_dir} could not be written ({error}). Nothing of it was kept.") from error
    notes = (*found.notes, folding_note(model), _masks_note(checkpoint))
    return Exported(
        path=out_dir,
        step=checkpoint.manifest.step,
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors),
        dtype=dtype,
        tokenizer=found.path,
        notes=tuple(note for note in notes if note is not None),
    )


def _write_facts(checkpoint: Checkpoint, out: Path, found: FoundTokenizer, dtype: str) -> None:
    """Everything but the weights. The generation settings an imported model came with are kept as they were."""
    model = checkpoint.manifest.model_config
    for file in found.files:
        shutil.copyfile(file, out / file.name)
    write_atomic(out / CONFIG_JSON, dumps(hf_config(model, dtype=dtype, eos_id=found.eos_id)))
    own = checkpoint.path / GENERATION_JSON
    generation = found.generation or (own if own.is_file() else None)
    if generation is not None:
        shutil.copyfile(generation, out / GENERATION_JSON)
    else:
        write_atomic(out / GENERATION_JSON, dumps(generation_config(model, eos_id=found.eos_id)))


def _masks_note(checkpoint: Checkpoint) -> str | None:
    """What a reader of the folder must know of `tokens.document_masks`, which no config.json can say."""
    path = checkpoint.path / CONFIG
    node: Node | None = load_file(path).root if path.is_file() else None
    for part in ("tokens", "document_masks"):
        node = None if node is None else child_of(node, part)
    if not (isinstance(node, Scalar) and node.text.lower() in ("true", "yes", "on")):
        return None
    return (
        "trained with document masks: attention never crossed a document, positions began anew in each; give "
        "transformers one document at a time, packed ones would see each other"
    )


def _tensors(checkpoint: Checkpoint, dtype: str | None) -> tuple[_Tensor, ...]:
    """What is written; dtype None: as it was saved."""
    model = checkpoint.manifest.model_config
    model_type = str(model["model_type"])
    try:
        return tuple(
            _Tensor(
                canonical=name,
                hf=to_hf(name, model_type),
                shape=tensor.shape,
                source=tensor.states["master"],
                dtype=dtype or tensor.states["master"],
                factor=folded_factor(name, model),
            )
            for name, tensor in checkpoint.index.tensors.items()
        )
    except KeyError as error:
        raise ConvertError(f"{checkpoint.path}: no Hugging Face name is known for {error} ({model_type}).") from error


def _write_weights(
    checkpoint: Checkpoint,
    tensors: Sequence[_Tensor],
    out: Path,
    max_shard_bytes: int,
    progress: ProgressCall,
) -> None:
    reader = BoxReader(checkpoint)
    shards = plan_shards([tensor.num_bytes for tensor in tensors], max_shard_bytes)
    weight_map: dict[str, str] = {}

    def arrays(members: range) -> Iterator[NDArray[Any]]:
        for i in members:
            progress(tensors[i].hf, i + 1, len(tensors))
            tensor = tensors[i]
            values = reader.tensor(tensor.canonical)
            yield cast(values, tensor.dtype, source=tensor.source, factor=tensor.factor)

    for number, members in enumerate(shards, start=1):
        name = ONE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        entries = [(tensors[i].hf, tensors[i].dtype, tensors[i].shape) for i in members]
        write_tensors(out / name, entries, arrays(members), metadata={"format": "pt"})
        weight_map |= {tensors[i].hf: name for i in members}
    if len(shards) > 1:
        total = sum(tensor.num_bytes for tensor in tensors)
        write_atomic(out / INDEX_FILE, dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
