"""The agent's lock on a node's shared memory: held while the agent lives, free the moment it is dead, however it died.

The agent's side is a process of its own, because a lock of the kernel ends with its process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent.shm import NodeMemory
from trainer.guard import FREE_LOOKS, Absence, AgentGuard, is_lock_free

AGENT = """
import sys, time
from pathlib import Path
from orchestrator.agent.shm import NodeMemory
memory = NodeMemory.create(Path(sys.argv[1]), num_ranks=2, agent_lost_s=float(sys.argv[2]))
print("ready", flush=True)
time.sleep(3600)
"""


class Agent:
    """A process that holds the file as an agent does."""

    def __init__(self, path: Path, *, lost_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(path), str(lost_s)], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path / "shm"


@pytest.fixture
def agent(shm: Path) -> Iterator[Agent]:
    found = Agent(shm, lost_s=0.2)
    yield found
    found.end()


def ranks_see(shm: Path, count: int = 4) -> set[bool | None]:
    """What several ranks see, each with the file open for itself, asking one after another and holding nothing."""
    fds = [os.open(shm, os.O_RDONLY) for _ in range(count)]
    try:
        return {is_lock_free(fd) for _ in range(3) for fd in fds}
    finally:
        for fd in fds:
            os.close(fd)


def test_held_by_a_living_agent_also_by_a_stopped_one_and_free_after_sigkill(shm: Path, agent: Agent) -> None:
    assert ranks_see(shm) == {False}
    agent.process.send_signal(signal.SIGSTOP)
    assert ranks_see(shm) == {False}, "a stopped agent is not a dead one"
    agent.process.send_signal(signal.SIGKILL)
    agent.process.wait()
    assert ranks_see(shm) == {True}


def test_children_of_the_agent_do_not_inherit_the_lock(shm: Path) -> None:
    memory = NodeMemory.create(shm, num_ranks=1, agent_lost_s=1.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as torchrun:
        assert ranks_see(shm) == {False}
        memory.close()
        assert ranks_see(shm) == {True}
        assert torchrun.poll() is None
        torchrun.kill()


def test_a_zombie_of_an_earlier_cycle_has_no_agent_though_the_new_file_has_one(shm: Path) -> None:
    old = NodeMemory.create(shm, num_ranks=1, agent_lost_s=1.0)
    fd = os.open(shm, os.O_RDONLY)
    old.close()
    new = NodeMemory.create(shm, num_ranks=1, agent_lost_s=1.0)
    assert is_lock_free(fd) is True and ranks_see(shm) == {False}
    os.close(fd)
    new.close()


def test_the_guard_speaks_once_after_the_agents_death_and_removes_only_its_own_file(shm: Path, agent: Agent) -> None:
    said: list[str] = []
    guards = [AgentGuard(shm, interval_s=5.0, on_gone=said.append) for _ in range(2)]
    assert [guard.limit_s for guard in guards] == [0.2, 0.2]
    for guard in guards:
        guard.start()
    agent.end()
    deadline = time.monotonic() + 30
    while len(said) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all("The agent of this node is gone" in text and str(shm) in text for text in said)
    guards[0].tidy()
    assert not shm.exists()
    shm.write_bytes(b"of a later launch")
    guards[1].tidy()
    assert shm.exists()


def test_a_rank_that_ends_leaves_the_file_of_a_living_agent(shm: Path, agent: Agent) -> None:
    guard = AgentGuard(shm, interval_s=5.0, on_gone=lambda _why: None)
    guard.tidy()
    assert shm.exists()
    agent.end()
    guard.tidy()
    assert not shm.exists()


def test_zero_means_that_nobody_looks(shm: Path) -> None:
    NodeMemory.create(shm, num_ranks=1).close()
    said: list[str] = []
    guard = AgentGuard(shm, interval_s=0.01, on_gone=said.append)
    guard.start()
    assert guard.limit_s == 0 and ranks_see(shm) == {True} and said == []


def test_a_kernel_that_does_not_answer_proves_nothing(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any) -> None:
        raise OSError(37, "No locks available")

    shm.write_bytes(b"")
    monkeypatch.setattr("fcntl.flock", fails)
    assert ranks_see(shm) == {None}


@given(st.lists(st.tuples(st.sampled_from([True, False, None]), st.floats(0, 20)), max_size=30), st.floats(0.1, 60))
def test_gone_means_free_at_every_look_for_the_whole_time(
    looks: list[tuple[bool | None, float]], limit_s: float
) -> None:
    absence, now, row = Absence(), 0.0, list[float]()
    for free, pause_s in looks:
        now += pause_s
        row = [*row, now] if free else []
        expected = len(row) >= FREE_LOOKS and row[-1] - row[0] >= limit_s
        assert absence.note(free, now, limit_s=limit_s) == expected
