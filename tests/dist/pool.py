"""A pool of gloo ranks that lives as long as the test session.

Starting eight processes that import torch costs more than most cases, so ranks are started once and run one function
after another; process groups are cached by their ranks. After any error or time-out a gloo world is beyond repair:
the pool is killed, and the next call starts a fresh one. A pool that is not told its size has as many ranks as the
largest mesh it was asked for.
"""

import importlib.util
import inspect
import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.mesh.topology import Axis, Topology

# How long ranks may go on after one of them failed: those that wait for it would wait for gloo's limit.
GRACE_S = 5.0


class RankError(AssertionError):
    """A rank raised; the text holds its traceback."""


class Ranks:
    """What a function running on a rank gets: its rank, and process groups by ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._groups: dict[tuple[int, ...], Any] = {}
        self._backgrounds: dict[tuple[int, ...], Any] = {}

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of `ranks`; None for non-members. KeyError if the caller did not announce it."""
        return self._groups[ranks] if self.rank in ranks else None

    def background(self, ranks: tuple[int, ...]) -> Any:
        """The second process group of all ranks of a mesh, for another thread. KeyError as `group`."""
        return self._backgrounds[ranks]

    def make_background(self, ranks: tuple[int, ...]) -> None:
        """As `make_group`."""
        import torch.distributed as dist

        self._backgrounds[ranks] = dist.new_group(list(ranks))

    def make_group(self, ranks: tuple[int, ...]) -> None:
        """Called on every rank of the pool in one order, members or not.

        new_group's use_local_synchronization would spare the others, but it names a group by how many groups the rank
        already has: ranks with different histories then wait for each other for ever.
        """
        import torch.distributed as dist

        is_world = len(ranks) == dist.get_world_size()
        self._groups[ranks] = dist.group.WORLD if is_world else dist.new_group(list(ranks))


def _serve(rank: int, size: int, store_path: str, pipe: Connection) -> None:
    # Not TORCH_DISTRIBUTED_DEBUG=DETAIL: it numbers messages like collectives, so that pipeline stages, which send
    # different numbers of them, look mismatched at the next reduction; and it slows reductions several times.
    # A rank that compiles does so itself: helpers of its own would cost more than they help.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_COMPILE_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ranks = Ranks(rank)
    while (work := pipe.recv()) is not None:
        where, args = work
        if isinstance(where, str):
            getattr(ranks, where)(*args)
            continue
        try:
            answer = (True, _find(*where)(ranks, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _find(module_name: str, file: str, function: str) -> Callable[..., Any]:
    """The function by name; a test module, which pytest imports under a name of its own, is loaded from its file."""
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    found: Callable[..., Any] = getattr(sys.modules[module_name], function)
    return found


class Pool:
    """`run(topology, function, *args)` calls `function(ranks, *args)` on the mesh's ranks, the first of the pool."""

    def __init__(self, size: int = 0, *, timeout_s: float = 120.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._workers: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._groups: set[tuple[int, ...]] = set()
        self._backgrounds: set[tuple[int, ...]] = set()

    def run(self, topology: Topology, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results in rank order. `function` is at its module's top level. Raises RankError with all tracebacks."""
        world_size = topology.world_size
        if len(self._workers) < world_size:
            self.close()
            self.size = max(self.size, world_size)
            self._start()
        self._announce(topology)
        where = (function.__module__, inspect.getfile(function), function.__qualname__)
        for _, pipe in self._workers[:world_size]:
            pipe.send((where, args))
        answers = self._collect(world_size)
        failures = [f"rank {rank}: {value}" for rank, (ok, value) in sorted(answers.items()) if not ok]
        if failures or len(answers) < world_size:
            self.close()
            silent = [rank for rank in range(world_size) if rank not in answers]
            late = [f"no answer from ranks {silent} within {self.timeout_s:.0f} s"] if silent else []
            raise RankError("\n".join([*failures, *late]))
        return [answers[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int) -> dict[int, tuple[bool, Any]]:
        """(whether it went well, result or text) by rank; after a failure the others get GRACE_S."""
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout_s
        while pipes and (ready := multiprocessing.connection.wait(list(pipes), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (OSError, EOFError) as error:
                    answers[rank] = (False, f"died: {error!r}")
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _announce(self, topology: Topology) -> None:
        """Have the whole pool make the groups of this mesh that it does not have yet."""
        groups = [tuple(range(topology.world_size)), *(g for axis in Axis for g in topology.groups(axis))]
        for ranks in dict.fromkeys(groups):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups.add(ranks)
                for _, pipe in self._workers:
                    pipe.send(("make_group", (ranks,)))
        world = groups[0]
        if len(world) > 1 and world not in self._backgrounds:
            self._backgrounds.add(world)
            for _, pipe in self._workers:
                pipe.send(("make_background", (world,)))

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = mp.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, there), daemon=True)
            process.start()
            self._workers.append((process, here))

    def close(self) -> None:
        """Kill all ranks; the next run starts new ones."""
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        self._groups, self._backgrounds = set(), set()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
