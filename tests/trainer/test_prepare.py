"""Texts into token folders: every format, restart at any point, one clear error for bad input; tokenizer training."""

import argparse
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from trainer.cli import main
from trainer.data import prepare as prepare_module
from trainer.data import zst
from trainer.data.documents import expand_inputs, read_documents
from trainer.data.format import TokenSource, verify
from trainer.data.prepare import FolderWriter, Request, prepare
from trainer.data.tokenizer import load_tokenizer, save_tokenizer, train_bpe
from trainer.errors import DataError, UsageError

TEXTS = [
    f"document {i} says: the pawl lets the ratchet turn only forward, été {i * i}\n" * (1 + i % 3) for i in range(40)
]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokenizer") / "tok"
    save_tokenizer(train_bpe(iter(TEXTS), vocab_size=300), out)
    return out


@pytest.fixture
def texts(tmp_path):
    """The same 40 documents as JSON lines."""
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def request(texts, out, **changes):
    fields = {"inputs": (str(texts),), "text_column": "text", "shard_tokens": 300, "out": out}
    return Request(**{**fields, **changes})


def decoded(folder, tokenizer_dir):
    """The documents of a folder, from its ids and document ends."""
    source, backend = TokenSource(folder), load_tokenizer(tokenizer_dir).backend
    documents = []
    for shard in source.metadata.shards:
        ids = np.fromfile(folder / shard.file, source.metadata.dtype)
        for part in np.split(ids, np.load(folder / shard.file.replace(".bin", ".docs.npy")).astype(int))[:-1]:
            assert part[-1] == source.metadata.eos_id
            documents.append(backend.decode(part[:-1].tolist(), skip_special_tokens=False))
    return documents


def test_every_document_is_there_once_in_order_and_the_folder_verifies(texts, tokenizer_dir, tmp_path):
    (metadata,) = prepare(request(texts, tmp_path / "out"), load_tokenizer(tokenizer_dir))
    assert decoded(tmp_path / "out", tokenizer_dir) == TEXTS
    assert metadata.num_documents == 40 and len(metadata.shards) > 3 and metadata.vocab_size == 300
    assert all(shard.tokens >= 300 for shard in metadata.shards[:-1])
    assert verify(TokenSource(tmp_path / "out")) == ()
    assert not list((tmp_path / "out").glob(".*"))


def test_a_holdout_takes_every_nth_document_and_nothing_is_in_both(texts, tokenizer_dir, tmp_path):
    made = prepare(
        request(texts, tmp_path / "out", holdout_every=7, holdout_out=tmp_path / "held"), load_tokenizer(tokenizer_dir)
    )
    assert [metadata.num_documents for metadata in made] == [35, 5]
    assert decoded(tmp_path / "held", tokenizer_dir) == TEXTS[6::7]
    assert decoded(tmp_path / "out", tokenizer_dir) == [text for i, text in enumerate(TEXTS) if i % 7 != 6]


@pytest.mark.parametrize("stop_at", [1, 2, 5, 7])
def test_a_stopped_preparation_continues_and_gives_the_same_files(stop_at, texts, tokenizer_dir, tmp_path, monkeypatch):
    def job(name):
        return request(texts, tmp_path / name, holdout_every=7, holdout_out=tmp_path / f"{name}-held")

    tokenizer = load_tokenizer(tokenizer_dir)
    monkeypatch.setattr(prepare_module, "BATCH_DOCUMENTS", 3)
    prepare(job("whole"), tokenizer)
    commits = 0
    plain = FolderWriter._commit_shard

    def stopping(self):
        nonlocal commits
        commits += 1
        if commits == stop_at:
            raise KeyboardInterrupt
        plain(self)

    monkeypatch.setattr(FolderWriter, "_commit_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(job("parts"), tokenizer)
    assert not list(tmp_path.glob("parts*/*.tmp")) + list(tmp_path.glob("parts*/.*.tmp")), "nothing half is left"
    assert (tmp_path / "parts").exists() == (stop_at > 1), "nor a folder without a shard"
    if stop_at > 1:
        with pytest.raises(DataError, match=r"Run the same `data prepare` command again"):
            TokenSource(tmp_path / "parts")
    monkeypatch.setattr(FolderWriter, "_commit_shard", plain)
    prepare(job("parts"), tokenizer)
    for kind in ("", "-held"):
        whole, parts = (sorted((tmp_path / f"{name}{kind}").iterdir()) for name in ("whole", "parts"))
        assert [file.name for file in whole] == [file.name for file in parts]
        assert all(a.read_bytes() == b.read_bytes() for a, b in zip(whole, parts, strict=True))


def test_the_same_command_again_does_nothing_and_another_is_refused(texts, tokenizer_dir, tmp_path):
    tokenizer = load_tokenizer(tokenizer_dir)
    first = prepare(request(texts, tmp_path / "out"), tokenizer)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    assert prepare(request(texts, tmp_path / "out"), tokenizer) == first
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before
    with pytest.raises(DataError, match="shard_tokens"):
        prepare(request(texts, tmp_path / "out", shard_tokens=999), tokenizer)
    with pytest.raises(DataError, match="holds other files"):
        prepare(request(texts, texts.parent), tokenizer)


def test_a_holdout_that_would_stay_empty_is_refused(texts, tokenizer_dir, tmp_path):
    with pytest.raises(DataError, match="40 documents in all and --holdout-every is 41"):
        prepare(
            request(texts, tmp_path / "out", holdout_every=41, holdout_out=tmp_path / "held"),
            load_tokenizer(tokenizer_dir),
        )


def test_every_file_kind_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"body": "three"}\n\n{"body": ""}\n{"body": "four"}\n')
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"body": "five"}\n')
    packed = [zstandard.compress(f'{{"body": "{word}"}}\n'.encode()) for word in ("five a", "five b")]
    (tmp_path / "c.jsonl.zst").write_bytes(b"".join(packed))
    pq.write_table(pa.table({"body": ["six", "seven"], "other": [1, 2]}), tmp_path / "d.parquet")
    (tmp_path / "notes.md").write_text("not read")
    files = expand_inputs([str(tmp_path)])
    found = [document for file in files for document in read_documents(file, column="body")]
    assert [document.text for document in found] == [
        "one\ntwo", "three", "four", "five", "five a", "five b", "six", "seven",
    ]  # fmt: skip
    assert [document.done for document in found if document.file.suffix == ".parquet"] == [0.5, 1.0]
    assert expand_inputs([str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]) == (tmp_path / "a.txt",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: is not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', r"line 1: has no field 'text' \(it has: body\).*--text-column"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: the field 'text' is int, not text"),
        ("a.jsonl", b"[1]\n", "line 1: has no field"),
        ("a.txt", b"ok\xff", "a.txt: is not UTF-8 .byte 2 is 0xff"),
        ("a.parquet", b"PAR1 no", "a.parquet: is not a parquet file"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00cut", "a.jsonl.gz: cannot be read"),
    ],
)
def test_bad_input_is_one_error_with_its_place(name, content, says, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        list(read_documents(tmp_path / name, column="text"))


def lines(count):
    return b"".join(json.dumps({"text": f"line {i} {i * i}"}).encode() + b"\n" for i in range(count))


def damaged(kind, packed):
    if kind == "cut":
        return packed[: len(packed) // 2]
    if kind == "changed":
        middle = len(packed) // 2
        return packed[:middle] + bytes(byte ^ 0xFF for byte in packed[middle : middle + 8]) + packed[middle + 8 :]
    return {"empty frame": packed[:3], "garbage behind": packed + b"garbage"}[kind]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
@pytest.mark.parametrize("kind", ["cut", "changed", "empty frame", "garbage behind"])
def test_a_damaged_packed_file_is_an_error_and_never_a_shorter_one(kind, pack, tmp_path):
    file = tmp_path / f"a.jsonl.{'gz' if pack is gzip.compress else 'zst'}"
    file.write_bytes(damaged(kind, pack(lines(20000))))
    with pytest.raises(DataError, match=f"a.jsonl.{file.suffix[1:]}"):
        list(read_documents(file, column="text"))


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_zst_files_of_many_frames_are_read_whole_in_pieces_of_any_size(chunk, tmp_path, monkeypatch):
    """Frames end anywhere in a piece: joined files, an empty frame, one without its size in the header."""
    monkeypatch.setattr(zst, "CHUNK_BYTES", chunk)
    streaming = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frames = [zstandard.compress(lines(50)), zstandard.compress(b""), streaming.compress(lines(9)) + streaming.flush()]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    with zst.open_zst(tmp_path / "a.jsonl.zst") as file:
        assert file.read() == lines(50) + lines(9)
    assert len(list(read_documents(tmp_path / "a.jsonl.zst", column="text"))) == 59


@pytest.mark.parametrize("given", ["nowhere", "*.none", "empty", "a.doc"])
def test_inputs_that_are_not_there_are_refused(given, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(DataError, match="--input"):
        expand_inputs([str(tmp_path / given)])


def test_a_trained_tokenizer_loads_in_transformers_and_is_lossless(tokenizer_dir):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(tokenizer_dir), load_tokenizer(tokenizer_dir)
    text = "Hello, wörld!  \t two  spaces\n\n日本"
    assert len(theirs) == ours.vocab_size == 300
    assert theirs.eos_token_id == ours.eos_id == 0
    assert theirs(text)["input_ids"] == ours.encode([text])[0]
    assert theirs.decode(ours.encode([text])[0]) == text


def test_the_vocabulary_counts_added_tokens(tokenizer_dir, tmp_path):
    backend = load_tokenizer(tokenizer_dir).backend
    backend.add_special_tokens(["<|extra|>"])
    save_tokenizer(backend, tmp_path / "more")
    assert load_tokenizer(tmp_path / "more").vocab_size == 301


@pytest.mark.parametrize(
    ("prepare_dir", "eos", "says"),
    [
        (lambda d: None, None, "there is no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), None, "is not a tokenizer file"),
        (lambda d: None, "<no>", "there is no tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused(prepare_dir, eos, says, tmp_path):
    prepare_dir(tmp_path)
    with pytest.raises(DataError, match=says):
        load_tokenizer(tmp_path, eos_token=eos)


def test_an_end_token_that_is_unknown_is_refused(tokenizer_dir, tmp_path):
    with pytest.raises(DataError, match="not in the vocabulary"):
        load_tokenizer(tokenizer_dir, eos_token="<no>")
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="--eos-token"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, eos_token="<|endoftext|>").eos_id == 0


@pytest.mark.parametrize(("vocab_size", "says"), [(256, "at least 257"), (50000, "gives only")])
def test_a_vocabulary_the_text_cannot_fill_is_refused(vocab_size, says):
    with pytest.raises(DataError, match=says):
        train_bpe(iter(TEXTS), vocab_size=vocab_size)


def test_the_commands(texts, tmp_path, capsys):
    tok, out, held = (str(tmp_path / name) for name in ("tok", "out", "held"))
    assert main(["data", "tokenizer", "train", "--input", str(texts), "--vocab-size", "280", "--out", tok]) == 0
    again = ["data", "tokenizer", "train", "--input", str(texts), "--vocab-size", "280", "--out", tok]
    assert main(again) == UsageError.exit_code == 2
    command = ["data", "prepare", "--input", str(texts), "--tokenizer", tok, "--out", out]
    assert main([*command, "--holdout-every", "4"]) == UsageError.exit_code
    assert main([*command, "--holdout-every", "4", "--holdout-out", held]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", out, "--verify"]) == 0
    assert "30 documents" in capsys.readouterr().out
    with (tmp_path / "out" / "shard-00000.bin").open("r+b") as file:
        file.write(b"\7")
    assert main(["data", "inspect", out, "--verify", "--json"]) == DataError.exit_code
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1


def tree(folder):
    return {str(path.relative_to(folder)): path.is_dir() or path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--text-column": "body"}, "has no field 'body'"),
        ({"--input": "nowhere"}, "--input nowhere"),
        ({"--tokenizer": "nowhere"}, "--tokenizer nowhere"),
        ({"--eos-token": "<no>"}, "'<no>' is not in the vocabulary"),
        ({"--holdout-every": "1", "--holdout-out": "held"}, "--holdout-every 1"),
        ({"--holdout-every": "41", "--holdout-out": "held"}, "held would be empty"),
        ({"--holdout-every": "4"}, "belong together"),
        ({"--holdout-every": "4", "--holdout-out": "in"}, "in holds other files"),
        ({"--shard-tokens": "0"}, "--shard-tokens 0"),
        ({"--input": "in/broken.jsonl"}, "line 41: is not JSON"),
    ],
    ids=lambda value: next(iter(value.items()))[1] if isinstance(value, dict) else "",
)
def test_a_failed_start_leaves_nothing_and_another_command_can_use_the_place(
    changes, says, texts, tokenizer_dir, tmp_path, monkeypatch, capsys
):
    (texts.parent / "broken.jsonl").write_text(texts.read_text() + "{")
    monkeypatch.chdir(tmp_path)
    before = tree(tmp_path)
    right = {"--input": str(texts), "--tokenizer": str(tokenizer_dir), "--out": "out"}
    code = main(["data", "prepare", *(word for pair in {**right, **changes}.items() for word in pair)])
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert code == (DataError.exit_code if "not JSON" in says else UsageError.exit_code)
    assert tree(tmp_path) == before
    assert main(["data", "prepare", *(word for pair in right.items() for word in pair)]) == 0


def test_a_folder_that_was_there_stays_and_complete_shards_are_kept(texts, tokenizer_dir, tmp_path):
    """A failure far into the input: what is complete is worth hours, so the folder keeps it and says what it is."""
    (tmp_path / "empty").mkdir()
    tokenizer = load_tokenizer(tokenizer_dir)
    with pytest.raises(UsageError):
        prepare(request(texts, tmp_path / "empty", text_column="body"), tokenizer)
    assert tree(tmp_path / "empty") == {}
    texts.write_text(texts.read_text() + "{")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="not JSON"):
        patch.setattr(prepare_module, "BATCH_DOCUMENTS", 3)
        prepare(request(texts, tmp_path / "out"), tokenizer)
    names = set(tree(tmp_path / "out"))
    assert {".prepare.json", "shard-00000.bin", "shard-00000.docs.npy"} <= names
    assert not [name for name in names if name.endswith(".tmp")]


@pytest.mark.parametrize("at", ["replace", "fsync_directory"])
def test_a_stop_between_the_two_renames_of_a_shard_blocks_nothing(at, texts, tokenizer_dir, tmp_path, monkeypatch):
    """Ctrl-C may fall between any two lines of a commit; the same command and, without a shard, any other still run."""
    tokenizer = load_tokenizer(tokenizer_dir)
    calls = 0
    plain = Path.replace if at == "replace" else prepare_module.fsync_directory

    def stopping(*args):
        nonlocal calls
        result = plain(*args)
        calls += "shard-00000" in str(args[0]) if at == "replace" else True
        if calls == 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(*((Path, "replace") if at == "replace" else (prepare_module, "fsync_directory")), stopping)
        with pytest.raises(KeyboardInterrupt):
            prepare(request(texts, tmp_path / "out"), tokenizer)
    assert set(tree(tmp_path) if (tmp_path / "out").exists() else {"in", "in/a.jsonl"}) == (
        {"in", "in/a.jsonl"} if at == "replace"
        else {"in", "in/a.jsonl", "out", "out/.prepare.json", "out/shard-00000.bin", "out/shard-00000.docs.npy"}
    )  # fmt: skip
    prepare(request(texts, tmp_path / "out", shard_tokens=300), tokenizer)
    assert decoded(tmp_path / "out", tokenizer_dir) == TEXTS


@pytest.mark.parametrize(
    ("words", "stopped", "says"),
    [
        (["prepare", "--tokenizer", "t", "--input", "i", "--out", "o"], "_prepare", "the same command goes on where"),
        (["tokenizer", "train", "--vocab-size", "9", "--input", "i", "--out", "o"], "_train_tokenizer", "nothing was"),
        (["inspect", "o"], "_inspect", "interrupted."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ctrl_c_is_one_line_and_130(words, stopped, says, monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"trainer.data.cli.{stopped}", stop)
    assert main(["data", *words]) == 130
    error = capsys.readouterr().err
    assert error.startswith("trainer data: interrupted") and says in error and error.count("\n") == 1


def test_a_stopped_tokenizer_leaves_nothing(tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.data.tokenizer._write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        save_tokenizer(train_bpe(iter(TEXTS), vocab_size=300), tmp_path / "tok")
    assert tree(tmp_path) == {}


def test_the_declared_arguments_are_those_of_the_contract():
    from trainer.data.cli import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = (
        "prepare --input a b --tokenizer t --out o --text-column c --shard-tokens 5 --holdout-every 3 --holdout-out h"
    )
    args = parser.parse_args(words.split())
    assert (args.input, args.text_column, args.shard_tokens, args.holdout_every) == (["a", "b"], "c", 5, 3)
