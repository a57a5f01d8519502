"""A batch is a function of the config and of consumed_samples; the mesh only decides who holds which row."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from token_folders import write_folder

from trainer.data.batch import IGNORE_LABEL
from trainer.data.format import TokenSource
from trainer.data.loader import HeldOut, Loader, spread
from trainer.errors import ConfigError, DataError
from trainer.mesh.topology import Topology
from trainer.schedules import BatchSize, batch_size_at, samples_before

LENGTH = 4


def stage(folders, weights=None, *, start=1, validation=None):
    data = SimpleNamespace(
        dataset=SimpleNamespace(dataset_folder=list(map(str, folders)), dataset_weights=weights),
        seed=None,
        validation=validation,
    )
    return SimpleNamespace(name="s", start_training_step=start, data=data)


def make_config(*stages, micro_batch_size=2, accumulation=2, dp=1, ramp=(), vocab_size=1000, seed=1, masks=False):
    """The part of a Config that the loader reads. `ramp`: (from_samples, samples) pairs."""
    sizes = ramp or ((0, micro_batch_size * accumulation * dp),)
    return SimpleNamespace(
        tokens=SimpleNamespace(sequence_length=LENGTH, micro_batch_size=micro_batch_size, document_masks=masks),
        num_micro_batches=accumulation,
        batch_sizes=tuple(BatchSize(from_samples=start, samples=samples) for start, samples in sizes),
        model=SimpleNamespace(model_config_=SimpleNamespace(vocab_size=vocab_size)),
        stages=stages,
        data_seed=seed,
    )


@pytest.fixture
def folders(tmp_path):
    """Two sources whose tokens are their own positions: 0… and 500…"""
    a = write_folder(tmp_path / "a", [list(range(33)), list(range(33, 101))], vocab_size=1000)
    b = write_folder(tmp_path / "b", [list(range(500, 541))], vocab_size=1000)
    return a, b


def test_a_sample_is_a_window_of_the_joined_tokens_with_labels_shifted_by_one(folders):
    loader = Loader(make_config(stage(folders, [3, 1])), Topology(), 0)
    batch = loader.batch(0, 0)
    assert batch.input_ids_MBT.shape == batch.labels_MBT.shape == (2, 2, LENGTH)
    assert batch.input_ids_MBT.dtype == torch.int64
    assert torch.equal(batch.labels_MBT, batch.input_ids_MBT + 1)
    assert (batch.input_ids_MBT[..., 0] % LENGTH == 0).all()
    assert torch.equal(batch.position_ids_MBT, torch.arange(LENGTH).expand(2, 2, LENGTH))
    assert batch.num_valid == 16 and batch.sample_ids == (0, 1, 2, 3)


def test_an_epoch_trains_on_every_whole_window_once(folders):
    loader = Loader(make_config(stage(folders[:1])), Topology(), 0)
    assert loader.samples_in(loader.sources[0]) == 25
    starts = [int(x) for step in range(7) for x in loader.batch(step, 4 * step).input_ids_MBT[..., 0].flatten()]
    assert sorted(starts[:25]) == list(range(0, 100, LENGTH))
    assert starts[25] in range(0, 100, LENGTH)  # the 26th sample is the first of the second epoch


@pytest.mark.parametrize(
    ("dp", "micro_batch_size", "accumulation"), [(1, 2, 6), (2, 3, 2), (3, 1, 4), (4, 3, 1), (6, 2, 1)]
)
def test_the_samples_of_a_step_do_not_depend_on_the_mesh(dp, micro_batch_size, accumulation, folders):
    config = make_config(
        stage(folders, [0.7, 0.3]), micro_batch_size=micro_batch_size, accumulation=accumulation, dp=dp
    )
    plain = Loader(make_config(stage(folders, [0.7, 0.3]), micro_batch_size=12, accumulation=1), Topology(), 0)
    topology = Topology(dp=dp, pp=2, tp=2)
    for step in (0, 5):
        rows = {}
        for rank in range(topology.world_size):
            batch = Loader(config, topology, rank).batch(step, 12 * step)
            for sample, row in zip(batch.sample_ids, batch.input_ids_MBT.reshape(-1, LENGTH).tolist(), strict=True):
                assert rows.setdefault(sample, row) == row
        whole = plain.batch(step, 12 * step)
        assert rows == dict(zip(whole.sample_ids, whole.input_ids_MBT.reshape(-1, LENGTH).tolist(), strict=True))


def test_a_micro_batch_over_all_dp_ranks_is_one_run_of_samples(folders):
    config = make_config(stage(folders), micro_batch_size=2, accumulation=2, dp=2)
    first, second = (Loader(config, Topology(dp=2), rank).batch(0, 8).sample_ids for rank in (0, 1))
    assert (first, second) == ((8, 9, 12, 13), (10, 11, 14, 15))


def test_there_is_no_state_and_global_generators_are_left_alone(folders):
    """T12."""
    torch.manual_seed(3)
    np_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()
    one = Loader(make_config(stage(folders)), Topology(), 0)
    later = one.batch(9, 36)
    one.batch(0, 0)
    assert torch.equal(one.batch(9, 36).input_ids_MBT, later.input_ids_MBT)
    assert torch.equal(
        Loader(make_config(stage(folders)), Topology(), 0).batch(9, 36).input_ids_MBT, later.input_ids_MBT
    )
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == np_state).all()


def test_a_stage_starts_at_its_step(folders):
    config = make_config(stage(folders[:1]), stage(folders[1:], start=3))
    loader = Loader(config, Topology(), 0)
    assert [bool((loader.batch(step, 4 * step).input_ids_MBT >= 500).all()) for step in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(("dp", "micro_batch_size"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_ramp_draws_every_sample_once_in_order_on_every_mesh(dp, micro_batch_size, folders):
    """R2 (MaxText#2656): the size follows from the samples consumed alone, wherever a run goes on."""
    ramp = ((0, 4), (8, 8), (30, 12))
    accumulation = 12 // (dp * micro_batch_size)
    config = make_config(
        stage(folders[:1]), stage(folders[1:], start=4), micro_batch_size=micro_batch_size, accumulation=accumulation,
        dp=dp, ramp=ramp,
    )  # fmt: skip
    loaders = [Loader(config, Topology(dp=dp), rank) for rank in range(dp)]
    for step in (5, 1, 2, 3, 4, 6, 7):
        consumed = samples_before(step, config.batch_sizes)
        batches = [loader.batch(step - 1, consumed) for loader in loaders]
        size = batch_size_at(consumed, config.batch_sizes)
        assert sorted(id for batch in batches for id in batch.sample_ids) == list(range(consumed, consumed + size))
        assert {batch.num_micro_batches for batch in batches} == {size // (dp * micro_batch_size)}
        is_second_stage = [bool((batch.input_ids_MBT >= 500).all()) for batch in batches]
        assert is_second_stage == [step >= 4] * dp, "a stage starts at its step, not at the samples of full batches"


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [1, float("nan")], [1.0], [1, 1, 1]])
def test_unusable_weights_are_config_errors_that_name_the_list(weights, folders):
    with pytest.raises(ConfigError, match="dataset_weights"):
        Loader(make_config(stage(folders, weights)), Topology(), 0)


def test_weight_zero_never_draws_and_does_not_block(folders):
    loader = Loader(make_config(stage(folders, [1, 0])), Topology(), 0)
    assert all((loader.batch(step, 4 * step).input_ids_MBT < 500).all() for step in range(20))


def test_a_source_shorter_than_one_sample_is_refused(folders, tmp_path):
    tiny = write_folder(tmp_path / "tiny", [[1, 2, 3]], vocab_size=1000)
    with pytest.raises(ConfigError, match="not one whole sample"):
        Loader(make_config(stage([folders[0], tiny], [1, 1])), Topology(), 0)


@pytest.mark.parametrize("declares_max", [True, False])
def test_one_id_outside_the_vocabulary_is_reported_before_step_1(declares_max, tmp_path):
    folder = write_folder(tmp_path / "d", [[1] * 20, [1, 50, 1]], declares_max=declares_max)
    with pytest.raises(DataError, match=r"token id 50 at token offset 1") as caught:
        Loader(make_config(stage([folder]), vocab_size=50), Topology(), 0)
    assert str(folder / "shard-00001.bin") in str(caught.value)


def test_an_id_that_changed_after_the_start_is_reported_with_file_offset_and_step(tmp_path):
    folder = write_folder(tmp_path / "d", [[1] * 21])
    loader = Loader(make_config(stage([folder]), vocab_size=50), Topology(), 0)
    with (folder / "shard-00000.bin").open("r+b") as file:
        file.seek(2 * 9)
        file.write(b"\x63\0")
    with pytest.raises(DataError, match=r"token id 99 at token offset 9, .* of step \d") as caught:
        for step in range(3):
            loader.batch(step, 4 * step)
    assert str(folder / "shard-00000.bin") in str(caught.value)


def test_folders_of_different_tokenizers_are_refused(folders, tmp_path):
    other = write_folder(tmp_path / "c", [[1] * 20], vocab_size=1000, tokenizer="bb")
    with pytest.raises(DataError, match="different tokenizers"):
        Loader(make_config(stage([folders[0], other])), Topology(), 0)


@pytest.mark.parametrize("mesh", [Topology(), Topology(dp=2, tp=2), Topology(dp=3, pp=2)])
def test_validation_is_the_same_set_on_every_mesh_and_at_every_call(mesh, folders):
    validation = SimpleNamespace(dataset_folder=[str(folders[1]), str(folders[0])], num_samples=7)
    config = make_config(stage(folders, validation=validation))
    seen, counts = {}, set()
    for rank in range(mesh.world_size):
        loader = Loader(config, mesh, rank)
        assert loader.held_out == (
            HeldOut(folder=str(folders[1]), num_samples=2),
            HeldOut(folder=str(folders[0]), num_samples=5),
        )
        batches = list(loader.validation_batches())
        counts.add(len(batches))
        again = [(source, batch.sample_ids) for source, batch in loader.validation_batches()]
        assert [(source, batch.sample_ids) for source, batch in batches] == again
        for source, batch in batches:
            assert all(sample < 0 or (sample >= 2) == source for sample in batch.sample_ids)
            labels = batch.labels_MBT.reshape(-1, LENGTH)
            for sample, row in zip(batch.sample_ids, labels, strict=True):
                if sample < 0:
                    assert (row == IGNORE_LABEL).all()
                else:
                    assert seen.setdefault(sample, row.tolist()) == row.tolist()
    assert len(counts) == 1 and sorted(seen) == list(range(7))
    places = [row[0] - 1 for _, row in sorted(seen.items())]
    assert places == [500, 520, 0, 20, 40, 60, 80]


def test_spread_takes_all_where_there_are_too_few():
    assert spread([2, 0, 1], 10) == ((0, 1), (), (0,))
    assert spread([10], 3) == ((0, 3, 6),)
    assert spread([], 3) == ()


def test_paths_are_taken_as_given(folders):
    assert Loader(make_config(stage(folders)), Topology(), 0).sources[0].folder == Path(folders[0])


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Tokens that are their own places, over two shards: documents end at 3, 9, 10 | 13, 27."""
    return write_folder(
        tmp_path / "d", [list(range(10)), list(range(10, 27))], vocab_size=1000, ends=[[3, 9, 10], [3, 17]]
    )


def test_the_loader_starts_positions_and_drops_labels_at_documents(documents: Path) -> None:
    config = make_config(stage([documents]), masks=True, micro_batch_size=1, accumulation=1)
    plain = make_config(stage([documents]), micro_batch_size=1, accumulation=1)
    begins = {3, 9, 10, 13}
    seen = set()
    for step in range(6):
        batch, whole = (Loader(c, Topology(), 0).batch(step, step) for c in (config, plain))
        ids = batch.input_ids_MBT.flatten().tolist()
        start = max([ids[0], *(b for b in begins if b in ids)])
        assert torch.equal(batch.input_ids_MBT, whole.input_ids_MBT)
        expected = [at - max(b for b in (ids[0], *begins) if b <= at and b >= ids[0]) for at in ids]
        assert batch.position_ids_MBT.flatten().tolist() == expected and start <= ids[-1]
        labels = [IGNORE_LABEL if at + 1 in begins else at + 1 for at in ids]
        assert batch.labels_MBT.flatten().tolist() == labels
        seen.update(ids)
    assert seen == set(range(24)), "every window was looked at"


@given(st.integers(0, 26), st.integers(1, 27), st.sets(st.integers(1, 26), max_size=6))
def test_document_starts_are_found_over_shards(start: int, count: int, ends: set[int]) -> None:
    source = TokenSource.__new__(TokenSource)
    every = sorted({*ends, 10, 27})
    source._starts = np.asarray([0, 10, 10, 27])
    source._ends = [
        np.asarray([e for e in every if e <= 10]),
        np.asarray([]),
        np.asarray([e - 10 for e in every if e > 10]),
    ]
    count = min(count, 27 - start)
    expected = [e - start for e in every if start < e < start + count]
    assert source.document_starts(start, count).tolist() == expected


@pytest.mark.parametrize("damage", ["missing", "cut", "of another shard"])
def test_a_document_index_that_does_not_fit_is_an_error_only_where_it_is_needed(documents: Path, damage: str) -> None:
    file = documents / "shard-00001.docs.npy"
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:-4])
    elif damage == "of another shard":
        np.save(file, np.asarray([3, 10], dtype="<u8"))
    Loader(make_config(stage([documents])), Topology(), 0)
    with pytest.raises(DataError, match=r"shard-00001\.docs\.npy"):
        Loader(make_config(stage([documents]), masks=True), Topology(), 0)
