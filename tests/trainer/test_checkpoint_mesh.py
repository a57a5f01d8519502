"""Save on one mesh, load on any other: every element arrives where it belongs, and the files hold each once."""

from itertools import product

import pytest
from checkpoint_world import LAYERS, assert_filled, empty_rank, expected, make_specs, save_world
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.boxes import assert_exact_cover, whole
from trainer.checkpoint.load import check_model, fill
from trainer.checkpoint.plan import owned_boxes
from trainer.checkpoint.reader import BoxReader, open_checkpoint
from trainer.checkpoint.tensorfile import TensorFile
from trainer.checkpoint.verify import problems
from trainer.errors import ConfigError
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES
from trainer.pipeline.schedule import Placement

MESHES = [Topology(dp=dp, pp=pp, tp=tp) for dp, pp, tp in product((1, 2), repeat=3)]
LARGE = Topology(dp=3, pp=3, tp=4)


def mesh_id(mesh):
    return f"dp{mesh.dp}pp{mesh.pp}tp{mesh.tp}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mesh", MESHES, ids=mesh_id)
def test_a_checkpoint_of_any_mesh_loads_on_every_other(mesh, tied, tmp_path):
    specs = make_specs(mesh, tied=tied)
    checkpoint = open_checkpoint(save_world(tmp_path, specs, mesh))
    for number, other in enumerate(MESHES):
        zero_stage = (number + mesh.dp) % 2
        other_specs = make_specs(other, tied=tied)
        for rank in range(other.world_size):
            shards = empty_rank(other_specs, other, rank, zero_stage=zero_stage)
            check_model(checkpoint, shards)
            fill(checkpoint, shards)
            assert_filled(shards)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_checkpoint_of_any_placement_of_stages_loads_on_every_other(tied, tmp_path):
    """One stage a rank, two in a loop, V-shaped (both tie sites on rank 0), and all on one rank."""
    two, one = Topology(dp=2, pp=2, tp=2), Topology()
    placements = [Placement.loop(2), Placement.loop(2, 2), Placement.v_shape(2)]
    worlds = [(two, make_specs(two, tied=tied, placement=placement)) for placement in placements]
    worlds.append((one, make_specs(one, tied=tied, placement=Placement.loop(1, 3))))
    for number, (mesh, specs) in enumerate(worlds):
        checkpoint = open_checkpoint(save_world(tmp_path / str(number), specs, mesh))
        for other, other_specs in worlds:
            for rank in range(other.world_size):
                shards = empty_rank(other_specs, other, rank, zero_stage=1)
                check_model(checkpoint, shards)
                fill(checkpoint, shards)
                assert_filled(shards)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_many_small_boxes_load_on_one_rank_and_back(zero_stage, tmp_path):
    one = Topology()
    for source, target in ((LARGE, one), (one, LARGE)):
        checkpoint = open_checkpoint(save_world(tmp_path / mesh_id(source), make_specs(source, tied=True), source))
        for rank in range(0, target.world_size, 5):
            shards = empty_rank(make_specs(target, tied=True), target, rank, zero_stage=zero_stage)
            fill(checkpoint, shards)
            assert_filled(shards)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, LAYERS), st.integers(1, 5), st.booleans(), st.integers(0, 1))
def test_the_boxes_that_all_ranks_own_tile_every_tensor_once_on_any_mesh(dp, pp, tp, tied, zero_stage):
    mesh = Topology(dp=dp, pp=pp, tp=tp)
    specs = make_specs(mesh, tied=tied)
    owned = [
        piece
        for rank in range(mesh.world_size)
        for piece in owned_boxes(
            specs, empty_rank(specs, mesh, rank, zero_stage=zero_stage).layout, mesh, rank, zero_stage
        )
    ]
    for spec in specs:
        assert_exact_cover(whole(spec.shape), (piece.box for piece in owned if piece.name == spec.name))


def test_zero_0_and_zero_1_write_the_same_files(tmp_path):
    mesh = Topology(dp=2, pp=2, tp=2)
    specs = make_specs(mesh, tied=True)
    saved = [save_world(tmp_path / f"zero{stage}", specs, mesh, zero_stage=stage) for stage in (0, 1)]
    for rank in range(mesh.world_size):
        name = f"rank-{rank:05d}.safetensors"
        assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes()


def test_files_hold_each_element_once_and_no_padding(tmp_path):
    mesh = Topology(dp=2, pp=2, tp=2)
    specs = make_specs(mesh, tied=True)
    path = save_world(tmp_path, specs, mesh)
    entries = [entry for file in path.glob("*.safetensors") for entry in TensorFile(file).entries.values()]
    assert sum(entry.num_bytes for entry in entries) == 4 * len(STATES) * sum(spec.numel for spec in specs)


def test_the_reader_assembles_whole_tensors(tmp_path):
    mesh = Topology(dp=2, pp=3, tp=2)
    specs = make_specs(mesh, tied=False)
    reader = BoxReader(open_checkpoint(save_world(tmp_path, specs, mesh)))
    for spec, state in product(specs, STATES):
        assert (reader.tensor(spec.name, state) == expected(state, spec).numpy()).all()


def test_other_readers_open_our_files(tmp_path):
    from safetensors import safe_open

    mesh = Topology(dp=1, pp=1, tp=1)
    path = save_world(tmp_path, make_specs(mesh, tied=True), mesh)
    with safe_open(path / "rank-00000.safetensors", framework="pt") as file:
        keys = [key for key in file.keys() if key.startswith("master/model.norm.weight@")]  # noqa: SIM118
        assert file.get_tensor(keys[0]).shape == (8,)
    assert problems(path) == ()


def test_a_model_of_another_shape_is_a_config_error_that_names_the_tensor(tmp_path):
    mesh = Topology(dp=1, pp=1, tp=1)
    checkpoint = open_checkpoint(save_world(tmp_path, make_specs(mesh, tied=True), mesh))
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        check_model(checkpoint, empty_rank(make_specs(mesh, tied=False), mesh, 0, zero_stage=1))
