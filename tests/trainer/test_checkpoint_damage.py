"""A damaged, half-written or forged checkpoint never loads, the file is named, and the one before is found."""

import json
import os
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
from checkpoint_world import facts, filled_rank, flip_byte, make_specs, save_world

from trainer.checkpoint import save as save_module
from trainer.checkpoint.naming import CheckpointName, parse_epoch, parse_name, partial_name
from trainer.checkpoint.save import begin, commit, write_rank
from trainer.checkpoint.tensorfile import write_tensors
from trainer.checkpoint.together import SaveFailed
from trainer.checkpoint.verify import choose_newest, problems
from trainer.errors import CheckpointInvalid
from trainer.mesh.topology import Topology

MESH = Topology(dp=2, pp=1, tp=1)
SPECS = make_specs(MESH, tied=True)
FILES = ["manifest.json", "index.json", "config.yaml", "rank-00000.safetensors", "rank-00001.safetensors"]


def newest_valid(directory: Path) -> str | None:
    path = choose_newest(directory).path
    return None if path is None else path.name


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_first(path: Path) -> None:
    flip_byte(path, 9)


def flip_last(path: Path) -> None:
    flip_byte(path, path.stat().st_size - 3)


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Trap(path.parent / "executed")))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [empty, halve, flip_first, flip_last, Path.unlink, replace_by_pickle])
def test_any_damage_to_any_file_is_found_named_and_falls_back_to_the_one_before(damage, name, tmp_path):
    """R2 (Lightning#688, metaseq#53); X4 (transformers#43140)."""
    older = save_world(tmp_path, SPECS, MESH, step=40)
    newest = save_world(tmp_path, SPECS, MESH, step=50)
    assert newest_valid(tmp_path) == newest.name
    damage(newest / name)
    (found, *_) = problems(newest)
    assert isinstance(found, CheckpointInvalid) and found.bad_file == newest / name and name in str(found)
    choice = choose_newest(tmp_path)
    assert choice.path == older
    assert [(rejected.name, rejected.bad_file) for rejected in choice.rejected] == [(newest.name, newest / name)]
    assert not (newest / "executed").exists()


@pytest.mark.parametrize("field", ["step", "consumed_samples", "adam_t"])
def test_a_changed_digit_of_the_run_state_is_found_though_the_manifest_parses(field, tmp_path):
    """R2 (Lightning#688, metaseq#53)."""
    path = save_world(tmp_path, SPECS, MESH) / "manifest.json"
    record = json.loads(path.read_text())
    record["state"][field] += 1
    path.write_text(json.dumps(record))
    (found,) = problems(path.parent)
    assert found.bad_file == path and "do not match its own xxh3 digest" in str(found)


def test_half_written_and_stray_entries_are_reported_and_never_chosen(tmp_path):
    """R1 (torchtitan#315, #4191)."""
    good = save_world(tmp_path, SPECS, MESH, step=30)
    cut = save_world(tmp_path, SPECS, MESH, step=40)
    (cut / "manifest.json").unlink()
    (tmp_path / "9999").mkdir()
    (tmp_path / "tmp-40").mkdir()
    (tmp_path / "50").write_text("")
    (tmp_path / "step-000000060.a0001g01c0001").write_text("")
    (tmp_path / ".step-000000070.a0001g01c0001.partial").mkdir()
    (tmp_path / ".trash-step-000000080.a0001g01c0001").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert newest_valid(tmp_path) == good.name
    assert {rejected.name for rejected in choose_newest(tmp_path).rejected} == {
        "9999",
        "tmp-40",
        "50",
        "step-000000060.a0001g01c0001",
        ".step-000000070.a0001g01c0001.partial",
        cut.name,
    }
    (reason,) = (rejected.reason for rejected in choose_newest(tmp_path).rejected if rejected.name == cut.name)
    assert str(cut / "manifest.json") in reason
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("directory", ["absent", ""])
def test_the_first_run_of_all_finds_nothing_and_that_is_no_error(directory, tmp_path):
    """R4 (Lightning#20347)."""
    assert newest_valid(tmp_path / directory) is None


def test_equal_steps_are_ordered_by_the_epoch_of_their_writer(tmp_path):
    path = save_world(tmp_path, SPECS, MESH, step=40)
    path.rename(path.with_name("step-000000040.a0010g01c0001"))
    save_world(tmp_path, SPECS, MESH, step=40)
    assert newest_valid(tmp_path) == "step-000000040.a0010g01c0001"


def test_names_round_trip_and_others_are_no_checkpoints():
    name = CheckpointName(12500, parse_epoch("a0003g01c0002"))
    assert str(name) == "step-000012500.a0003g01c0002" and parse_name(str(name)) == name
    for other in ("step-12500.a0003g01c0002", "step-000012500", partial_name(name), ".quarantine-" + str(name), "50"):
        assert parse_name(other) is None


def test_a_save_never_overwrites_a_checkpoint_or_a_leftover(tmp_path):
    final = save_world(tmp_path, SPECS, MESH)
    partial = tmp_path / partial_name(parse_name(final.name))
    with pytest.raises(SaveFailed, match="exists already"):
        begin(final, partial)
    assert problems(final) == () and not partial.exists()
    final.rename(partial)
    with pytest.raises(SaveFailed, match="exists already"):
        begin(final, partial)
    assert (partial / "manifest.json").exists()


def test_a_file_that_shrank_before_the_commit_stops_it(tmp_path):
    name = CheckpointName(10, (1, 1, 1))
    final, partial = tmp_path / str(name), tmp_path / partial_name(name)
    ranks = [filled_rank(SPECS, MESH, rank, zero_stage=1) for rank in range(2)]
    begin(final, partial)
    files = [asdict(write_rank(partial, shards)) for shards in ranks]
    halve(partial / "rank-00001.safetensors")
    with pytest.raises(OSError, match="rank-00001"):
        commit(partial, final, ranks[0], facts(name), files)
    assert newest_valid(tmp_path) is None


def test_a_disk_that_returns_other_bytes_than_it_took_is_noticed_before_the_commit(tmp_path, monkeypatch):
    def lossy(path, *args, beside_sync):
        def spoiled():
            flip_last(path)
            beside_sync()

        return write_tensors(path, *args, beside_sync=spoiled)

    monkeypatch.setattr(save_module, "write_tensors", lossy)
    with pytest.raises(OSError, match=r"rank-00000.safetensors: what is read back is not what was written"):
        save_world(tmp_path, SPECS, MESH)
    assert newest_valid(tmp_path) is None


def test_everything_is_durable_before_the_name_that_counts(tmp_path, monkeypatch):
    """R1 (torchtitan#315): fsync and rename in order: data, then the folder, then the manifest, then its name."""
    done, fsync, replace, rename = [], os.fsync, Path.replace, Path.rename

    def noted_fsync(descriptor):
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def noted_replace(source, target):
        done[-1] = ("sync", target.name)  # what was synced under a temporary name
        return replace(source, target)

    def noted_rename(source, target):
        done.append(("rename", source.name))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    monkeypatch.setattr(Path, "rename", noted_rename)
    final = save_world(tmp_path, SPECS, MESH)
    partial = partial_name(parse_name(final.name))
    assert done[-2:] == [("rename", partial), ("sync", tmp_path.name)]
    manifest = done.index(("sync", "manifest.json"))
    assert done[manifest - 1] == ("sync", partial) == done[manifest + 1]
    assert {name for _, name in done[: manifest - 1]} == {*FILES, partial} - {"manifest.json"}
