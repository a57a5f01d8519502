"""`trainer inspect` says what a checkpoint holds, finds damage, and needs no torch for it."""

import json
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_world import expected, flip_byte, make_specs, save_world

from trainer.cli import main
from trainer.differences import _numbers, compare
from trainer.errors import CheckpointInvalid
from trainer.mesh.topology import Topology

MESH = Topology(dp=2, tp=2)


@pytest.fixture
def checkpoint(tmp_path):
    return save_world(tmp_path, make_specs(MESH, tied=True), MESH)


def test_it_says_what_is_inside(checkpoint, capsys):
    assert main(["inspect", str(checkpoint), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "step 40" in text and "dp=2 pp=1 tp=2" in text and text.endswith("verified\n")
    assert main(["inspect", str(checkpoint)]) == 0
    assert "not verified" in capsys.readouterr().out


def test_damage_is_named_and_changes_the_exit_code(checkpoint, capsys):
    bad = checkpoint / "rank-00002.safetensors"
    flip_byte(bad, bad.stat().st_size // 2)
    assert main(["inspect", str(checkpoint), "--verify", "--json"]) == CheckpointInvalid.exit_code
    record = json.loads(capsys.readouterr().out)
    assert [problem["file"] for problem in record["problems"]] == [str(bad)]
    assert record["state"]["consumed_samples"] == 320 and record["files"][bad.name] == bad.stat().st_size


def test_tables_that_do_not_read_are_one_error(checkpoint, capsys):
    (checkpoint / "manifest.json").write_text("[]")
    assert main(["inspect", str(checkpoint)]) == CheckpointInvalid.exit_code
    assert str(checkpoint / "manifest.json") in capsys.readouterr().err


@pytest.mark.parametrize(
    "module", ["trainer.inspect", "trainer.differences", "trainer.convert.cli", "trainer.data.cli"]
)
def test_no_torch_is_imported(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_with_shape_dtype_and_size_layers_folded(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "model.layers.{0…2}.mlp.gate_proj.weight" in text and "12×8" in text and "exp_avg:F32" in text
    assert "config of 1 lines" in text
    assert main(["inspect", str(checkpoint), "--config"]) == 0
    assert capsys.readouterr().out == "general: {}\n"
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    gate = record["tensors"]["model.layers.0.mlp.gate_proj.weight"]
    assert (gate["shape"], gate["bytes"], set(gate["states"])) == (
        [12, 8],
        12 * 8 * 3 * 4,
        {"master", "exp_avg", "exp_avg_sq"},
    )
    assert sum(tensor["bytes"] for tensor in record["tensors"].values()) == record["num_parameters"] * 12
    assert record["config"] == "general: {}\n" and len(record["xxh3"]) == 32


def changed(folder, key="master/model.norm.weight", by=0.5):
    """Add `by` to one element of a saved box; the file keeps its size, so only its digest is wrong."""
    for file in sorted(folder.glob("rank-*.safetensors")):
        data = bytearray(file.read_bytes())
        length = struct.unpack("<Q", data[:8])[0]
        for name, value in json.loads(data[8 : 8 + length]).items():
            if name.startswith(key):
                at = 8 + length + value["data_offsets"][0]
                old = struct.unpack("<f", data[at : at + 4])[0]
                data[at : at + 4] = struct.pack("<f", old + by)
                file.write_bytes(data)
                return old
    raise AssertionError(f"no {key}")


def test_a_checkpoint_does_not_differ_from_itself_on_another_mesh(checkpoint, tmp_path, capsys):
    mesh = Topology(pp=2)
    other = save_world(tmp_path / "other", make_specs(mesh, tied=True), mesh)
    assert main(["inspect", str(checkpoint), "--diff", str(other)]) == 0
    text = capsys.readouterr().out
    assert "have the same values" in text and "config: the same" in text
    assert "dp=2 pp=1 tp=2" in text and "dp=1 pp=2 tp=1" in text


def test_a_changed_element_is_the_first_row_with_its_size(checkpoint, tmp_path, capsys):
    other = save_world(tmp_path / "other", make_specs(MESH, tied=True), MESH, step=50)
    changed(other, by=4.0)
    changed(other, "exp_avg/model.embed_tokens.weight", by=float("nan"))
    assert main(["inspect", str(checkpoint), "--diff", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    norm = np.linalg.norm(expected("master", {s.name: s for s in make_specs(MESH, tied=True)}["model.norm.weight"]))
    first, second = found["tensors"]
    assert (first["name"], first["nonfinite"], first["max_abs"]) == ("model.embed_tokens.weight", 1, 0.0)
    assert (second["name"], second["state"], second["max_abs"]) == ("model.norm.weight", "master", 4.0)
    assert second["relative"] == pytest.approx(4.0 / norm, rel=1e-6)
    assert (found["one"]["step"], found["other"]["step"]) == (40, 50)


def test_tensors_that_only_one_side_has_and_other_shapes(tmp_path, capsys):
    specs = make_specs(Topology(), tied=False)
    cut = tuple(spec for spec in specs if spec.name != "lm_head.weight")
    wide = tuple(
        replace(spec, shape=(16,), padded_shape=(16,)) if spec.name == "model.norm.weight" else spec for spec in cut
    )
    a = save_world(tmp_path / "a", specs, Topology())
    b = save_world(tmp_path / "b", wide, Topology())
    assert main(["inspect", str(a), "--diff", str(b)]) == 0
    text = capsys.readouterr().out
    assert "tensor removed: lm_head.weight" in text
    assert "tensor of another shape: model.norm.weight: [8] → [16]" in text
    assert main(["inspect", str(b), "--diff", str(a)]) == 0
    assert "tensor added: lm_head.weight" in capsys.readouterr().out


def test_bfloat16_bits_are_read_as_the_numbers_they_are():
    values = np.array([1.0, -2.5, 0.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert compare(_numbers(bits, "BF16"), values) is None
    found = compare(_numbers(bits, "BF16"), values + 1)
    assert found is not None and found["max_abs"] == 1.0
