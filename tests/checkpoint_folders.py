"""Checkpoint folders as a launch leaves them: names, manifests and sizes are right, the tensors are four bytes."""

from pathlib import Path

import orch_worlds as w

from orchestrator.state.codec import dumps
from orchestrator.state.epochs import Epoch
from orchestrator.state.records import Cycle, CycleNode, Manifest, ManifestFile, ManifestState
from orchestrator.state.rundir import RunPaths, make_cycle

E1 = Epoch(1, 1, 1)


def start(paths: RunPaths, epoch: Epoch, resume_from: str | None) -> None:
    make_cycle(paths, epoch)
    cycle = Cycle(
        run="x",
        epoch=epoch,
        nonce="n",
        resume_from=resume_from,
        nodes=(CycleNode(node_rank=0, name="node0", address="127.0.0.1"),),
        ranks_per_node=1,
        world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        beat_interval_s=1.0,
        created_unix=1.0,
    )
    paths.cycle_file(epoch.attempt, epoch.cycle).write_text(dumps(cycle))


def save(paths: RunPaths, step: int, epoch: Epoch = E1, *, run: str = "x") -> Path:
    folder = paths.checkpoint(w.name(step, epoch))
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"1234")
    manifest = Manifest(
        run=run,
        step=step,
        epoch=epoch.text,
        files=(ManifestFile(name="rank-00000.safetensors", bytes=4, xxh3="0"),),
        state=ManifestState(step=step, consumed_samples=step, consumed_tokens=step, adam_t=step),
        total_bytes=4,
        pawl_version="0",
        torch_version="2",
        created_unix=1.0,
    )
    (folder / "manifest.json").write_text(dumps(manifest))
    return folder


def names(paths: RunPaths) -> set[str]:
    return {entry.name for entry in paths.checkpoints.iterdir()}
