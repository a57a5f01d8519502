"""`trainer inspect` says what a checkpoint holds, finds damage, and needs no torch for it."""

import json
import subprocess
import sys

import pytest
from checkpoint_world import flip_byte, make_specs, save_world

from trainer.cli import main
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


@pytest.mark.parametrize("module", ["trainer.inspect", "trainer.convert.cli", "trainer.data.cli"])
def test_no_torch_is_imported(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
