"""The tokenizer as data preparation needs it: ids of a text, the full size of the vocabulary, the end of a document.

Only `tokenizer.json` (the `tokenizers` library's format) and the two small files beside it are read; a name on a hub is
not resolved, because a compute node may have no network and a run must not depend on one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import DataError, UsageError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_JSON = "tokenizer.json"
MIN_VOCAB_SIZE = 257
"""Every byte and the end of a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """vocab_size: one more than the largest id, added tokens included, so that every id fits an embedding of it."""

    backend: Any
    path: Path
    sha256: str
    vocab_size: int
    eos_id: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it; several cores at once."""
        return [encoding.ids for encoding in self.backend.encode_batch(list(texts), add_special_tokens=False)]


def load_tokenizer(path: Path, *, eos_token: str | None = None) -> LoadedTokenizer:
    """Load a folder that holds tokenizer.json, or the file. eos_token: overrides what the folder says.

    Raises UsageError: nothing there, not a tokenizer, no end-of-text token known, or it is not in the vocabulary.
    """
    from tokenizers import Tokenizer

    file = path / TOKENIZER_JSON if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"--tokenizer {path}: there is no {TOKENIZER_JSON}. Give a folder or file on this machine.")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise UsageError(f"--tokenizer {file}: is not a tokenizer file ({error}).") from error
    vocabulary: Mapping[str, int] = backend.get_vocab(with_added_tokens=True)
    token = eos_token or _declared_eos(file.parent)
    if token is None:
        raise UsageError(f"{file.parent} does not say which token ends a document. Name it with --eos-token.")
    if token not in vocabulary:
        raise UsageError(f"The end-of-document token {token!r} is not in the vocabulary of {file}. See --eos-token.")
    return LoadedTokenizer(
        backend=backend,
        path=path,
        sha256=tokenizer_sha256(file),
        vocab_size=max(vocabulary.values()) + 1,
        eos_id=vocabulary[token],
    )


def tokenizer_sha256(file: Path) -> str:
    """SHA-256 of a tokenizer.json: what makes two data folders speak the same language."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _declared_eos(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{folder / name}: cannot be read as a JSON object ({error}).") from error
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            return token
    return None


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Any:
    """A byte-level BPE of exactly `vocab_size` entries, id 0 ends a document. Raises UsageError: too little text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"--vocab-size {vocab_size}: at least {MIN_VOCAB_SIZE} are needed (256 bytes, end of document)."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    found = backend.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise UsageError(
            f"--vocab-size {vocab_size}: this text gives only {found} entries. Add text, or ask for fewer."
        )
    return backend


def save_tokenizer(backend: Any, out: Path) -> None:
    """Write a folder that transformers' AutoTokenizer loads. Whole or not at all; raises UsageError if `out` exists."""
    if out.exists():
        raise UsageError(f"--out {out} exists. Remove it or choose another place; nothing is overwritten.")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    try:
        partial.mkdir(parents=True)
        backend.save(str(partial / TOKENIZER_JSON))
        _write_json(partial / "tokenizer_config.json", config)
        _write_json(partial / "special_tokens_map.json", {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT})
        partial.rename(out)
    except OSError as error:
        raise DataError(f"--out {out}: cannot be written ({error}).") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already where all went well


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
