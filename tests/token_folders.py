"""Small token folders, written by hand so that tests know every id in them."""

import json
from pathlib import Path

import numpy as np

from trainer.data.format import Metadata, Shard, docs_file, file_xxh3, token_dtype


def write_folder(
    folder: Path,
    shards: list[list[int]],
    *,
    vocab_size: int = 100,
    tokenizer: str = "aa",
    declares_max: bool = True,
    ends: list[list[int]] | None = None,
) -> Path:
    """One document per shard, or documents that end before `ends`; the last id of a shard is the end of its last."""
    folder.mkdir(parents=True)
    dtype = token_dtype(vocab_size)
    records = []
    for number, ids in enumerate(shards):
        file = folder / f"shard-{number:05d}.bin"
        np.asarray(ids, dtype=dtype).tofile(file)
        of_shard = [len(ids)] if ends is None else ends[number]
        np.save(folder / docs_file(file.name), np.asarray(of_shard, dtype="<u8"))
        records.append(
            Shard(
                file=file.name,
                tokens=len(ids),
                documents=len(of_shard),
                xxh3=file_xxh3(file),
                max_id=max(ids) if declares_max else None,
            )
        )
    metadata = Metadata(
        dtype=dtype,
        vocab_size=vocab_size,
        eos_id=0,
        num_tokens=sum(map(len, shards)),
        num_documents=sum(record.documents for record in records),
        tokenizer={"path": "t", "sha256": tokenizer},
        shards=tuple(records),
        source={},
    )
    (folder / "metadata.json").write_text(json.dumps(metadata.to_json()))
    return folder
