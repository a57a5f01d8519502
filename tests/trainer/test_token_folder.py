"""Reading token folders: over shard borders, and one clear error for everything that is wrong with one."""

import json
from pathlib import Path

import numpy as np
import pytest
from token_folders import write_folder

from trainer.data.format import BadId, TokenSource, docs_file, first_bad_id, token_dtype, verify
from trainer.errors import DataError


def test_shards_are_one_sequence(tmp_path):
    source = TokenSource(write_folder(tmp_path / "d", [[1, 2, 3], [4], [5, 6, 7, 8]]))
    assert len(source) == 8
    for start in range(8):
        for count in range(9 - start):
            assert source.read(start, count).tolist() == list(range(start + 1, start + count + 1))
    assert source.locate(3) == (tmp_path / "d" / "shard-00001.bin", 0)
    assert source.locate(7) == (tmp_path / "d" / "shard-00002.bin", 3)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65535, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_id_width_follows_the_full_vocabulary(vocab_size, dtype, tmp_path):
    assert token_dtype(vocab_size) == dtype
    source = TokenSource(write_folder(tmp_path / "d", [[vocab_size - 1, 0]], vocab_size=vocab_size))
    assert source.read(0, 2).tolist() == [vocab_size - 1, 0]


def test_the_first_bad_id_is_found_with_file_and_offset(tmp_path):
    source = TokenSource(write_folder(tmp_path / "d", [[1, 2, 99], [3, 98, 99, 4]]))
    assert first_bad_id(source, 100) is None
    assert first_bad_id(source, 99) == BadId(file=tmp_path / "d" / "shard-00000.bin", offset=2, token_id=99)
    assert first_bad_id(source, 99, trust_declared=True) == first_bad_id(source, 99)
    assert first_bad_id(source, 98) == BadId(file=tmp_path / "d" / "shard-00000.bin", offset=2, token_id=99)
    second = TokenSource(write_folder(tmp_path / "e", [[1, 2, 3], [3, 98, 99, 4]]))
    assert first_bad_id(second, 98) == BadId(file=tmp_path / "e" / "shard-00001.bin", offset=1, token_id=98)


def damage_metadata(folder: Path, **fields: object) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: (d / "metadata.json").unlink(), "data prepare"),
        (lambda d: (d / "metadata.json").write_text("{"), "metadata.json"),
        (lambda d: (d / "metadata.json").write_bytes(b"\x80\x04\x95"), "metadata.json"),
        (lambda d: damage_metadata(d, schema_version=2), "version"),
        (lambda d: damage_metadata(d, num_tokens=9), "num_tokens"),
        (lambda d: damage_metadata(d, dtype="object"), "dtype"),
        (
            lambda d: damage_metadata(d, shards=[{"file": "../x", "tokens": 4, "documents": 1, "xxh3": ""}]),
            "plain name",
        ),
        (lambda d: (d / "shard-00000.bin").unlink(), "missing"),
        (lambda d: (d / "shard-00000.bin").write_bytes(b"\1\0\2\0"), "ends at token 2"),
        (lambda d: (d / "shard-00000.bin").write_bytes(b""), "0 bytes"),
    ],
)
def test_a_broken_folder_is_one_clear_error(damage, says, tmp_path):
    folder = write_folder(tmp_path / "d", [[1, 2, 3, 0]])
    damage(folder)
    with pytest.raises(DataError, match=says) as caught:
        TokenSource(folder)
    assert str(folder) in str(caught.value)


def test_a_folder_that_is_not_there_says_so(tmp_path):
    with pytest.raises(DataError, match="does not exist on this machine"):
        TokenSource(tmp_path / "nowhere")


def test_verify_reads_everything(tmp_path):
    folder = write_folder(tmp_path / "d", [[1, 2, 0], [3, 4, 5, 0]])
    source = TokenSource(folder)
    assert verify(source) == ()
    (folder / "shard-00001.bin").write_bytes(np.asarray([3, 4, 100, 0], np.uint16).tobytes())
    np.save(folder / docs_file("shard-00000.bin"), np.asarray([2], "<u8"))
    ends, digest, bad = verify(TokenSource(folder))
    assert "shard-00000.docs.npy" in ends
    assert "shard-00001.bin" in digest and "xxh3" in digest
    assert "100 at token offset 2" in bad


def test_document_ends_are_never_unpickled(tmp_path):
    folder = write_folder(tmp_path / "d", [[1, 2, 0]])
    np.save(folder / docs_file("shard-00000.bin"), np.asarray([{"a": 1}], dtype=object), allow_pickle=True)
    (problem,) = verify(TokenSource(folder))
    assert "docs.npy" in problem
