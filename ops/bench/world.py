"""A world of gloo ranks on this machine that runs one function and ends."""

import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class WorldError(RuntimeError):
    """A rank raised or did not answer; the text holds its traceback."""


def in_world(size: int, function: Callable[..., Any], *args: Any, limit_s: float = 900.0) -> list[Any]:
    """`function(*args)` on each of `size` ranks, with torch.distributed's world joined where there are several.

    Results in rank order. `function` is at its module's top level. One thread a rank. Raises WorldError.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for rank in range(size):
            here, there = context.Pipe()
            where = (rank, size, str(Path(folder) / "store"), limit_s)
            process = context.Process(target=_serve, args=(where, there, function, args), daemon=True)
            process.start()
            there.close()
            workers.append((process, here))
        try:
            answers = _collect([pipe for _, pipe in workers], limit_s)
        finally:
            for process, _ in workers:
                process.kill()
                process.join()
    failures = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(answers) if not ok]
    if failures:
        raise WorldError("\n".join(failures))
    return [value for _, value in answers]


def _collect(pipes: list[Connection], limit_s: float) -> list[tuple[bool, Any]]:
    """(whether it went well, result or text) by rank. After a failure the others, who may wait for it, get 5 s."""
    answers: list[tuple[bool, Any]] = [(False, f"no answer within {limit_s:.0f} s")] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + limit_s
    while waiting and (ready := mp.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except (OSError, EOFError) as error:
                answers[rank] = (False, f"died: {error!r}")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + 5.0)
    return answers


def _serve(
    where: tuple[int, int, str, float], pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, size, store_path, limit_s = where
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if size > 1:
            store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=limit_s))
        answer = (True, function(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
