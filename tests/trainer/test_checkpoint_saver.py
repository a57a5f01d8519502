"""One rank's saver: memory it takes, what it writes, one save at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from checkpoint_world import filled_rank, make_spec, make_specs

from trainer.checkpoint import save as save_module
from trainer.checkpoint.contents import RankContents
from trainer.checkpoint.saver import Label, Saver
from trainer.checkpoint.shards import RankShards
from trainer.checkpoint.state import RunState
from trainer.checkpoint.tensorfile import TensorFile, encode_header
from trainer.checkpoint.together import SaveFailed
from trainer.checkpoint.verify import problems
from trainer.comm import solo
from trainer.errors import DesyncError
from trainer.mesh.context import Background
from trainer.mesh.topology import Topology
from trainer.optim.layout import STATES, plan_rank_layout
from trainer.pipeline.schedule import Placement

ONE = Topology()
MIB = 1 << 20


def saver_of(shards: RankShards, folder: Path, compare: Callable[[int], None] = lambda step: None) -> Saver:
    label = Label(
        checkpoints_dir=folder, epoch="a0001g01c0001", run="test", config_text="general: {}\n",
        model_config={"model_type": "llama"}, tokenizer=None,
    )  # fmt: skip
    return Saver(label, meeting=Background(world=solo()), shards=lambda: shards, compare=compare, is_async=True)


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """What this process holds at most while the block runs, over what it held before, in bytes."""
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss - before)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def test_saves_take_a_tenth_more_memory_than_what_they_save(tmp_path: Path) -> None:
    """Over two saves: the snapshot is allocated once, and nothing else of its size is."""
    specs = (make_spec(1, Placement.loop(1), "model.embed_tokens.weight", (4096, 4096), 0, (0,)),)
    layout_of = partial(plan_rank_layout, specs, ONE)
    tensors = {(state, bucket.index): torch.ones(bucket.numel) for bucket in layout_of(0).buckets for state in STATES}
    shards = RankShards(specs=specs, topology=ONE, layout_of=layout_of, rank=0, zero_stage=1, tensors=tensors)
    with peak_of_memory() as peak:
        saver = saver_of(shards, tmp_path)
        for step in (1, 2):
            saver.start(RunState(step=step), waits=False)
            saver.collect()
    saved = sum(4 * tensor.numel() for tensor in tensors.values())
    assert saved == 192 * MIB == saver.snapshot_bytes
    assert 0.95 < peak[0] / saved <= 1.1


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_file_is_its_boxes_and_its_header_and_a_snapshot_its_boxes(zero_stage: int, tmp_path: Path) -> None:
    """Also under ZeRO-0, where a rank holds more than it writes."""
    mesh = Topology(dp=2, pp=1, tp=2)
    specs = make_specs(mesh, tied=True)
    for rank in range(mesh.world_size):
        shards = filled_rank(specs, mesh, rank, zero_stage=zero_stage)
        contents = RankContents(shards, keeps_snapshot=True)
        save_module.write_contents(tmp_path, contents.snapshot(shards))
        file = TensorFile(tmp_path / contents.file)
        boxes = sum(entry.num_bytes for entry in file.entries.values())
        assert file.path.stat().st_size == boxes + len(encode_header(contents.entries))
        assert contents.snapshot_bytes == boxes


def test_the_step_is_on_record_before_a_save_beside_training_begins(tmp_path: Path) -> None:
    specs = make_specs(ONE, tied=True)
    saver = saver_of(filled_rank(specs, ONE, 0, zero_stage=1), tmp_path)
    seen: list[tuple[bool, str]] = []

    def line() -> None:
        seen.append((tmp_path.exists() and any(tmp_path.iterdir()), threading.current_thread().name))

    saver.start(RunState(step=3), line, waits=False)
    assert seen == [(False, threading.main_thread().name)]
    assert saver.collect().name == "step-000000003.a0001g01c0001"
    saver.start(RunState(step=4), lambda: seen.append((True, "")), waits=True)
    assert len(seen) == 2 and saver.is_done() and saver.collect().step == 4


def test_one_save_at_a_time(tmp_path: Path) -> None:
    saver = saver_of(filled_rank(make_specs(ONE, tied=True), ONE, 0, zero_stage=1), tmp_path)
    saver.start(RunState(step=3), waits=False)
    with pytest.raises(AssertionError, match="one save"):
        saver.start(RunState(step=4), waits=False)
    assert saver.step == 3 and saver.collect().step == 3 and saver.step is None


def test_copies_that_differ_are_neither_snapshot_nor_saved(tmp_path: Path) -> None:
    def differ(step: int) -> None:
        raise DesyncError(f"Replicas differ after step {step}", suspects=(1,))

    saver = saver_of(filled_rank(make_specs(ONE, tied=True), ONE, 0, zero_stage=1), tmp_path, differ)
    with pytest.raises(DesyncError, match="after step 3"):
        saver.start(RunState(step=3), waits=False)
    assert saver.step is None and list(tmp_path.iterdir()) == []


def test_a_save_whose_name_is_taken_fails_and_the_one_there_stays(tmp_path: Path) -> None:
    saver = saver_of(filled_rank(make_specs(ONE, tied=True), ONE, 0, zero_stage=1), tmp_path)
    saver.start(RunState(step=3), waits=False)
    saver.collect()
    saver.start(RunState(step=3), waits=False)
    with pytest.raises(SaveFailed, match="exists already"):
        saver.collect()
    (there,) = tmp_path.iterdir()
    assert saver.step is None and problems(there) == ()
