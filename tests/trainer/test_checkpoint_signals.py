"""Signals that ask for a drain, at random moments of a run that saves all the time."""

import os
import random
import signal
import time
from argparse import Namespace
from pathlib import Path

import tiny_run

from trainer.checkpoint.verify import choose_newest, problems
from trainer.launch import read_launch
from trainer.run import TrainerProcess

RUNS, STEPS = 20, 1000


def run_in_child(config: Path, run_dir: Path) -> int:
    """The pid of a child, forked from this warm process, that trains alone and ends with the trainer's exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = os.open(run_dir / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            args = Namespace(config_file=config, run_dir=run_dir, cycle=None, shm=None)
            code = TrainerProcess(read_launch(args, {})).run()
        finally:
            os._exit(code)
    return child


def test_a_signal_at_a_random_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """R12 (Lightning#21406, #21407): the handler sets a flag; the save comes at the border. 20 of 20."""
    config = tiny_run.make(tmp_path, train_steps=STEPS, interval=2)
    random.seed(12)
    for number in range(RUNS):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        child = run_in_child(config, run_dir)
        deadline = time.monotonic() + 60
        while not list(run_dir.glob("checkpoints/step-*")):
            assert time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0), (
                run_dir / "log"
            ).read_text()
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.2))
        os.kill(child, random.choice((signal.SIGTERM, signal.SIGUSR2)))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 75, (run_dir / "log").read_text()
        newest = choose_newest(run_dir / "checkpoints")
        assert newest.path is not None and newest.rejected == () and problems(newest.path) == ()
        (journal,) = run_dir.rglob("train.jsonl")
        last = len(journal.read_text().splitlines())
        assert newest.path.name.startswith(f"step-{last:09d}."), "of the border it drained at"
