"""A Hugging Face folder → a checkpoint of step 0, as a stream of its tensors.

    config.json        understood, or refused by field            (hf_model.py)
    *.safetensors      headers read, names and shapes compared    (hf_folder.py)
    one tensor after the other is copied in its own dtype, digested, read back; the manifest is written last
    tokenizer and generation files lie beside the weights, so that later exports carry them

The result has weights and no moments: a fresh run starts from it (`model.init_method.path`), `export` writes it back
bit for bit. Its name is the user's; the manifest says `run: imported`, an epoch that no attempt has, and its source.
"""

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trainer import __version__
from trainer.checkpoint.boxes import whole
from trainer.checkpoint.index import Index, SavedBox, SavedTensor
from trainer.checkpoint.manifest import FileRecord, Manifest
from trainer.checkpoint.naming import CONFIG, INDEX, MANIFEST, box_key, rank_file
from trainer.checkpoint.state import RunState
from trainer.checkpoint.tensorfile import write_tensors
from trainer.config.architecture import ModelConfig
from trainer.config.model import (
    Config,
    Data,
    Dataset,
    General,
    LearningRateScheduler,
    Model,
    Optimizer,
    Parallelism,
    Tokens,
)
from trainer.config.tree import to_yaml
from trainer.config.yaml_loader import Mapping as MappingNode
from trainer.convert.hf_folder import HfTensor, HfWeights, dumps, open_weights, read_json_file, same_bytes
from trainer.convert.hf_model import CONFIG_JSON, ConvertError, HfModel, node_of, read_hf_config
from trainer.convert.shards import MAX_SHARD_BYTES, plan_shards
from trainer.convert.tokenizer_files import GENERATION_JSON, TOKENIZER_FILES
from trainer.data.format import file_xxh3
from trainer.data.tokenizer import TOKENIZER_JSON, tokenizer_sha256
from trainer.fsio import fsync_directory, write_atomic
from trainer.mesh.topology import Topology
from trainer.models.families import FAMILY_KEYS
from trainer.mup import standard_attention_scale
from trainer.spec import EMBEDDING, HEAD, param_specs

IMPORTED_RUN = "imported"
NO_EPOCH = "a0000g00c0000"

_FROM_NAME = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}

ProgressCall = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import made."""

    path: Path
    num_parameters: int
    num_bytes: int
    dtype: str
    has_tokenizer: bool
    notes: tuple[str, ...]


def import_hf(
    folder: Path,
    out: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: ProgressCall | None = None,
) -> Imported:
    """Write the checkpoint `out`. Raises ConvertError before anything is written where the folder is not understood."""
    if out.exists():
        raise ConvertError(f"{out} exists. Choose another folder; an import overwrites nothing.")
    if not folder.is_dir():
        raise ConvertError(f"{folder} is no folder on this machine. Download the model first; nothing is fetched here.")
    hf = read_hf_config(read_json_file(folder / CONFIG_JSON), where=str(folder / CONFIG_JSON))
    weights = open_weights(folder, hf.model.model_type)
    tensors, notes = _whole_model(folder, hf.model, weights)
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        index, records = _write_weights(partial, tensors, max_shard_bytes, progress or (lambda *_: None))
        records += _write_files(folder, partial, out, hf, index, tensors)
        _write_manifest(folder, partial, out, hf, tensors, records)
        partial.rename(out)
        fsync_directory(out.parent)
    except (OSError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConvertError(f"{out} could not be written ({error}). Nothing of it was kept.") from error
    return Imported(
        path=out,
        num_parameters=sum(_numel(tensor) for tensor in tensors.values()),
        num_bytes=sum(tensor.entry.num_bytes for tensor in tensors.values()),
        dtype=_dtype(hf, tensors),
        has_tokenizer=_has_tokenizer(folder),
        notes=(*hf.notes, *notes),
    )


def config_of(model: ModelConfig, dtype: str = "bfloat16") -> Config:
    """A config around a model section, for what is computed from a whole one; its other sections mean nothing."""
    trained = dtype if dtype in ("float32", "float64") else "bfloat16"
    return Config(
        general=General(project=IMPORTED_RUN, run=IMPORTED_RUN),
        parallelism=Parallelism(dp=1, pp=1, tp=1),
        model=Model(model_config=model, dtype=trained),  # type: ignore[arg-type]
        optimizer=Optimizer(learning_rate_scheduler=LearningRateScheduler(learning_rate=1e-5)),
        tokens=Tokens(sequence_length=1, train_steps=1, micro_batch_size=1, batch_accumulation_per_replica=1),
        data=Data(dataset=Dataset(dataset_folder=["none"])),
    )


def _whole_model(folder: Path, model: ModelConfig, weights: HfWeights) -> tuple[dict[str, HfTensor], tuple[str, ...]]:
    """Exactly the tensors of the model, in its order. Raises ConvertError naming the tensor that is not right."""
    tensors, notes = dict(weights.tensors), weights.notes
    head, embedding = tensors.get(HEAD), tensors.get(EMBEDDING)
    if model.tie_word_embeddings and head is not None and embedding is not None:
        if not same_bytes(head, embedding):
            raise ConvertError(
                f"{folder}: tie_word_embeddings is true, but {head.name} and {embedding.name} differ. Which one is "
                "meant cannot be known: set tie_word_embeddings to false in config.json if the head was trained apart."
            )
        del tensors[HEAD]
        notes += (f"{head.name} is a copy of the embedding, which it is tied to; one copy is kept",)
    specs = param_specs(config_of(model), Topology())
    missing = [spec.name for spec in specs if spec.name not in tensors]
    if missing:
        hint = " (tie_word_embeddings is false, so there must be one)" if missing[0] == HEAD else ""
        raise ConvertError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}{hint}.")
    extra = sorted(tensors.keys() - {spec.name for spec in specs})
    if extra:
        raise ConvertError(f"{folder}: holds {tensors[extra[0]].name}, which config.json gives the model no place for.")
    for spec in specs:
        tensor = tensors[spec.name]
        if tensor.entry.shape != spec.shape:
            raise ConvertError(
                f"{tensor.file.path}: {tensor.name} has shape {tensor.entry.shape}, config.json makes it {spec.shape}."
            )
        if tensor.entry.dtype not in _FROM_NAME:
            raise ConvertError(
                f"{tensor.file.path}: {tensor.name} holds {tensor.entry.dtype}, no floating-point weights."
            )
    return {spec.name: tensors[spec.name] for spec in specs}, notes


def _write_weights(
    partial: Path, tensors: Mapping[str, HfTensor], max_shard_bytes: int, progress: ProgressCall
) -> tuple[Index, list[FileRecord]]:
    """Weight files of at most about `max_shard_bytes`, so that ranks share out their verification."""
    names, records = list(tensors), []
    saved: dict[str, SavedTensor] = {}

    def arrays(members: Sequence[int]) -> Iterator[NDArray[Any]]:
        for i in members:
            progress(names[i], i + 1, len(names))
            yield tensors[names[i]].array()

    for number, members in enumerate(plan_shards([t.entry.num_bytes for t in tensors.values()], max_shard_bytes)):
        path, entries = partial / rank_file(number), []
        for name in (names[i] for i in members):
            entry = tensors[name].entry
            box = whole(entry.shape)
            entries.append((box_key("master", name, box.offset), entry.dtype, entry.shape))
            boxes = (SavedBox(file=path.name, box=box),)
            saved[name] = SavedTensor(shape=entry.shape, states={"master": entry.dtype}, boxes=boxes)
        written = write_tensors(path, entries, arrays(members))
        if file_xxh3(path) != written.xxh3:
            raise OSError(f"{path}: what is read back is not what was written")
        records.append(FileRecord(name=path.name, bytes=written.num_bytes, xxh3=written.xxh3))
    mesh = {"dp": 1, "pp": 1, "tp": 1, "cp": 1, "zero_stage": 0}
    return Index(step=0, mesh=mesh, tensors=saved), records


def _write_files(
    folder: Path, partial: Path, out: Path, hf: HfModel, index: Index, tensors: Mapping[str, HfTensor]
) -> list[FileRecord]:
    """index.json, config.yaml, and what exports carry along."""
    write_atomic(partial / INDEX, dumps(index.to_json()))
    write_atomic(partial / CONFIG, config_text(hf.model, _dtype(hf, tensors), out, _has_tokenizer(folder)))
    names = [INDEX, CONFIG]
    for name in (*TOKENIZER_FILES, GENERATION_JSON):
        if (folder / name).is_file():
            write_atomic(partial / name, (folder / name).read_bytes())
            names.append(name)
    return [_record(partial / name) for name in names]


def config_text(model: ModelConfig, dtype: str, out: Path, has_tokenizer: bool) -> str:
    """The sections of a config that starts from this checkpoint, to paste."""
    values = {
        key: value
        for key, value in model.model_dump(exclude_none=True).items()
        if key not in FAMILY_KEYS or key in model.family.keys
    }
    values.get("rope_parameters", {}).pop("rope_theta", None)
    trained = config_of(model, dtype).model.dtype
    sections: dict[str, Any] = {
        "model": {"model_config": values, "init_method": {"path": str(out.resolve())}, "dtype": trained}
    }
    if has_tokenizer:
        sections["tokenizer"] = {"tokenizer_name_or_path": str(out.resolve())}
    tree = node_of(sections)
    assert isinstance(tree, MappingNode)
    head = "# Imported. These sections start a run from its weights; the others of a config are yours.\n"
    return head + to_yaml(tree)


def _write_manifest(
    folder: Path, partial: Path, out: Path, hf: HfModel, tensors: Mapping[str, HfTensor], records: list[FileRecord]
) -> None:
    tokenizer = None
    if _has_tokenizer(folder):
        tokenizer = {"path": str(out.resolve()), "sha256": tokenizer_sha256(partial / TOKENIZER_JSON)}
    model = {
        **hf.model.model_dump(),
        "dtype": _dtype(hf, tensors),
        "attention_scale": standard_attention_scale(hf.model.head_size),
        "output_multiplier": 1.0,
        "source": {
            "format": "hf", "path": str(folder.resolve()), "transformers_version": hf.transformers_version,
            "pawl_version": __version__,
        },
    }  # fmt: skip
    manifest = Manifest(
        run=IMPORTED_RUN,
        step=0,
        epoch=NO_EPOCH,
        state=RunState(),
        model_config=model,
        tokenizer=tokenizer,
        files=tuple(records),
        pawl_version=__version__,
        torch_version=version("torch"),
        created_unix=time.time(),
    )
    write_atomic(partial / MANIFEST, dumps(manifest.to_json()))


def _has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_JSON).is_file()


def _record(path: Path) -> FileRecord:
    return FileRecord(name=path.name, bytes=path.stat().st_size, xxh3=file_xxh3(path))


def _dtype(hf: HfModel, tensors: Mapping[str, HfTensor]) -> str:
    """What config.json says, else what most of the weights are."""
    if hf.dtype is not None:
        return hf.dtype
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[tensor.entry.dtype] += _numel(tensor)
    return _FROM_NAME[numbers.most_common(1)[0][0]]


def _numel(tensor: HfTensor) -> int:
    return math.prod(tensor.entry.shape)
