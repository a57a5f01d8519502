"""The weights of a Hugging Face folder: which tensor lies in which safetensors file. Headers alone are read.

Pickled weights (`.bin`, `.pth`, `.pt`) are never opened: reading one runs what it says.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from trainer.checkpoint.tensorfile import TensorEntry, TensorFile
from trainer.convert.hf_model import ConvertError
from trainer.convert.names import from_hf
from trainer.fsio import RecordUnreadable, read_json

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLES = (".bin", ".pth", ".pt", ".ckpt")

# Of old Llama folders: computed from the config, and by nobody read.
_BUFFERS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfTensor:
    """A tensor where it lies. name: as the file has it."""

    name: str
    file: TensorFile
    entry: TensorEntry

    def array(self) -> NDArray[Any]:
        """Its values, mapped; bfloat16 as uint16 bits."""
        return self.file.array(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfWeights:
    """Canonical name → tensor. notes: what was found and not used."""

    tensors: Mapping[str, HfTensor]
    notes: tuple[str, ...] = field(default=())


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ConvertError."""
    try:
        return dict(read_json(path))
    except RecordUnreadable as error:
        raise ConvertError(str(error)) from error


def open_weights(folder: Path, model_type: str) -> HfWeights:
    """The tensors of a folder under pawl's names. Raises ConvertError naming file and tensor."""
    files, promised, notes = _files(folder)
    found: dict[str, HfTensor] = {}
    for name in files:
        for tensor in _tensors(folder / name):
            if tensor.name in found:
                other = found[tensor.name].file.path.name
                raise ConvertError(f"{folder}: {tensor.name} is both in {other} and in {name}. Download it again.")
            found[tensor.name] = tensor
    _compare(folder, found, promised)
    plain = {name: tensor for name, tensor in found.items() if not name.endswith(_BUFFERS)}
    if len(plain) < len(found):
        notes += (f"{len(found) - len(plain)} tensors *.{_BUFFERS[0]} are computed anew",)
    named = {_canonical(folder, name, model_type): tensor for name, tensor in plain.items()}
    if len(named) < len(plain):
        raise ConvertError(f"{folder}: a tensor is there with and without the prefix 'model.'.")
    return HfWeights(tensors=named, notes=notes)


def _files(folder: Path) -> tuple[tuple[str, ...], Mapping[str, str] | None, tuple[str, ...]]:
    """(files, the index's tensor → file or None, notes). As transformers: one file goes before an index."""
    if (folder / ONE_FILE).is_file():
        extra = f"{INDEX_FILE} is not used: there is {ONE_FILE}"
        return (ONE_FILE,), None, (extra,) if (folder / INDEX_FILE).exists() else ()
    if not (folder / INDEX_FILE).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        hint = (
            f" {pickles[0]} is a pickle, which may run code when it is read; it never is. Convert it where you trust "
            "it: model.save_pretrained(DIR, safe_serialization=True)."
            if pickles
            else ""
        )
        raise ConvertError(f"{folder}: holds neither {ONE_FILE} nor {INDEX_FILE}.{hint}")
    record = read_json_file(folder / INDEX_FILE)
    promised = record.get("weight_map")
    if not isinstance(promised, dict) or not promised or not all(isinstance(name, str) for name in promised.values()):
        raise ConvertError(f"{folder / INDEX_FILE}: weight_map is no table of tensor and file.")
    files = tuple(sorted(set(promised.values())))
    for name in files:
        if "/" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise ConvertError(f"{folder / INDEX_FILE}: {name!r} is not the plain name of a safetensors file.")
        if not (folder / name).is_file():
            raise ConvertError(f"{folder / name} is missing, which {INDEX_FILE} names. Download it again.")
    return files, promised, _total(folder, record, files)


def _total(folder: Path, record: Mapping[str, Any], files: tuple[str, ...]) -> tuple[str, ...]:
    """A note where the index's total is not that of the files: no error, as every tensor is checked on its own."""
    said = (record.get("metadata") or {}).get("total_size")
    real = sum(tensor.entry.num_bytes for name in files for tensor in _tensors(folder / name))
    same = said is None or said == real
    return () if same else (f"{INDEX_FILE} says {said} bytes in total, its files have {real:,} bytes of tensors",)


def _tensors(path: Path) -> Iterator[HfTensor]:
    try:
        file = TensorFile(path)
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: {error}.") from error
    for name, entry in file.entries.items():
        yield HfTensor(name=name, file=file, entry=entry)


def _compare(folder: Path, found: Mapping[str, HfTensor], promised: Mapping[str, str] | None) -> None:
    """The index and the files must name the same tensors, each in the same file."""
    for name, file in (promised or {}).items():
        if name not in found or found[name].file.path.name != file:
            raise ConvertError(f"{folder / file} does not hold {name}, which {INDEX_FILE} promises. Download it again.")
    extra = sorted(found.keys() - promised.keys()) if promised is not None else []
    if extra:
        where = found[extra[0]].file.path
        raise ConvertError(f"{where} holds {extra[0]}, which {INDEX_FILE} does not name. Download it again.")


def _canonical(folder: Path, name: str, model_type: str) -> str:
    """pawl's name; a model saved without its head has names without `model.`."""
    for candidate in (name, f"model.{name}"):
        try:
            return from_hf(candidate, model_type)
        except KeyError:
            continue
    raise ConvertError(f"{folder}: holds {name}, which no {model_type} has. What is it? It would be left out silently.")


def same_bytes(one: HfTensor, other: HfTensor, *, chunk: int = 1 << 24) -> bool:
    """Whether two tensors are the same bits, compared in parts."""
    if (one.entry.dtype, one.entry.shape) != (other.entry.dtype, other.entry.shape):
        return False
    left, right = (tensor.array().reshape(-1).view("u1") for tensor in (one, other))
    return all((left[at : at + chunk] == right[at : at + chunk]).all() for at in range(0, left.size, chunk))


def dumps(record: Mapping[str, Any]) -> str:
    """JSON as these folders have it."""
    return json.dumps(record, indent=2) + "\n"
