"""The tokenizer an export carries: which files, from which folder, and whether it is the one of the training."""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.reader import Checkpoint
from trainer.convert.hf_model import ConvertError
from trainer.data.tokenizer import TOKENIZER_JSON, load_tokenizer, tokenizer_sha256
from trainer.errors import DataError

GENERATION_JSON = "generation_config.json"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokenizer:
    """path: None where there is none. generation: a generation_config.json that came with an imported model."""

    path: Path | None = None
    files: tuple[Path, ...] = ()
    generation: Path | None = None
    eos_id: int | None = None
    notes: tuple[str, ...] = ()


def find_tokenizer(checkpoint: Checkpoint, given: Path | None) -> FoundTokenizer:
    """`given`, else the one the checkpoint names, else the one that lies in it. Raises ConvertError: another one."""
    named = checkpoint.manifest.tokenizer
    if given is None and named is None:
        return FoundTokenizer(notes=("the run names no tokenizer, so the folder has none; add one with --tokenizer",))
    path = given if given is not None else Path(str(named["path"] if named else ""))
    if given is None and not path.exists() and (checkpoint.path / TOKENIZER_JSON).is_file():
        path = checkpoint.path  # imported, and moved since
    file = path / TOKENIZER_JSON if path.is_dir() else path
    if not file.is_file():
        if given is not None:
            raise ConvertError(f"--tokenizer {given}: there is no {TOKENIZER_JSON}.")
        return FoundTokenizer(notes=(f"the run's tokenizer {path} is not on this machine; add it with --tokenizer",))
    recorded = named.get("sha256") if named else None
    if recorded is not None and recorded != tokenizer_sha256(file):
        raise ConvertError(
            f"{file} is not the tokenizer the run was trained with (its sha256 differs). "
            "Name the right one with --tokenizer."
        )
    files = tuple(file.parent / name for name in TOKENIZER_FILES if (file.parent / name).is_file())
    generation = file.parent / GENERATION_JSON if (file.parent / GENERATION_JSON).is_file() else None
    try:
        eos_id = load_tokenizer(path).eos_id
    except DataError as error:
        note = f"no end token could be set: {error}"
        return FoundTokenizer(path=path, files=files, generation=generation, notes=(note,))
    return FoundTokenizer(path=path, files=files, generation=generation, eos_id=eos_id)
