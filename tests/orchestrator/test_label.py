"""Every line of a rank names the rank, and arrives whatever becomes of the rank: real processes, no torch."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.agent import proc
from orchestrator.agent.label import MAX_LINE, Lines, Sink, label_of, labelled
from orchestrator.decide.signatures import SIGNATURES, find_signatures, is_cascade
from orchestrator.state.fsio import read_text

NONCE = "labelled"


def start(program: str, log: Path, rank: int = 3) -> subprocess.Popen[bytes]:
    """`program` as a rank of torchrun would run it, both streams to `log` as the agent opens it."""
    environ = {**os.environ, "RANK": str(rank), proc.NONCE_KEY: f"{NONCE}-{os.getpid()}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "orchestrator.agent.label", "-c", program]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environ, start_new_session=True)


def written(log: Path) -> list[str]:
    """The log once nobody writes it any more."""
    deadline = time.monotonic() + 30
    while proc.find(nonce=f"{NONCE}-{os.getpid()}"):
        assert time.monotonic() < deadline, "the labeller does not end"
        time.sleep(0.01)
    return log.read_text().splitlines()


def test_both_streams_and_what_is_written_below_python_are_labelled_in_order(tmp_path: Path) -> None:
    program = "import os,sys; print('out'); print('err',file=sys.stderr); os.write(2,b'C library\\n'); 1/0"
    rank = start(program, tmp_path / "log")
    assert rank.wait() == 1
    lines = written(tmp_path / "log")
    assert lines[:3] == ["[rank3]: out", "[rank3]: err", "[rank3]: C library"]
    assert lines[-1] == "[rank3]: ZeroDivisionError: division by zero"
    assert all(line.startswith("[rank3]: ") for line in lines)


def test_what_was_written_before_a_sigkill_of_the_whole_group_arrives(tmp_path: Path) -> None:
    program = "import os,signal; print('x'*70000); print('last, no line feed', end=''); os.killpg(0, signal.SIGKILL)"
    rank = start(program, tmp_path / "log")
    assert rank.wait() == -signal.SIGKILL, "torchrun must see how the rank ended, not how a process around it did"
    lines = written(tmp_path / "log")
    assert lines[-1] == "[rank3]: last, no line feed"
    assert "".join(line.removeprefix("[rank3]: ") for line in lines[:-1]) == "x" * 70000


def test_the_rank_is_the_process_that_torchrun_started_and_has_no_children(tmp_path: Path) -> None:
    program = "import os,sys; print(os.getpid(), sys.argv, sys.flags.safe_path)\ntry: os.wait()\n"
    rank = start(program + "except ChildProcessError: print('no child')", tmp_path / "log")
    assert rank.wait() == 0
    assert written(tmp_path / "log") == [f"[rank3]: {rank.pid} ['-c'] True", "[rank3]: no child"]


def test_the_labeller_outlives_the_signals_that_a_group_gets_and_is_found_by_the_nonce(tmp_path: Path) -> None:
    program = "import signal,time; signal.signal(15, lambda *a: print('asked to end')); print('up'); signal.pause()"
    rank = start(program, tmp_path / "log")
    deadline = time.monotonic() + 30
    while "up" not in (read_text(tmp_path / "log") or ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(proc.find(nonce=f"{NONCE}-{os.getpid()}")) == 2
    for process in proc.find(nonce=f"{NONCE}-{os.getpid()}"):
        proc.send(process, signal.SIGTERM)
    assert rank.wait() == 0
    assert written(tmp_path / "log") == ["[rank3]: up", "[rank3]: asked to end"]


@given(data=st.lists(st.binary(max_size=12).map(lambda part: part.replace(b"r", b"\n")), max_size=20))
def test_however_the_bytes_come_each_line_is_labelled_once_and_none_is_lost(data: list[bytes]) -> None:
    lines = Lines(b"[rank0]: ")
    found = [line for part in data for line in lines.feed(part)] + lines.flush()
    whole = b"".join(data)
    expected = whole.split(b"\n")[:-1] + ([whole.rpartition(b"\n")[2]] if whole.rpartition(b"\n")[2] else [])
    assert [line for line in found] == [b"[rank0]: " + line + b"\n" for line in expected]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = Lines(b"")
    found = [line for _ in range(40) for line in lines.feed(b"x" * 8192)]
    assert max(map(len, found)) <= MAX_LINE + 1
    assert sum(map(len, found)) - len(found) + len(b"".join(lines.flush()).rstrip()) == 40 * 8192


def test_lines_that_torch_has_labelled_are_left_as_they_are() -> None:
    assert labelled(b"[rank3]: Traceback", b"[rank3]: ") == b"[rank3]: Traceback\n"
    assert labelled(b"[rank3]:[W socket.cpp] late", b"[rank3]: ") == b"[rank3]:[W socket.cpp] late\n"
    assert labelled(b"[rank30]: other", b"[rank3]: ") == b"[rank3]: [rank30]: other\n"


@pytest.mark.parametrize(("environ", "label"), [({"RANK": "12"}, b"[rank12]: "), ({}, b""), ({"RANK": "x"}, b"")])
def test_the_label_is_the_global_rank(environ: dict[str, str], label: bytes) -> None:
    assert label_of(environ) == label


def test_a_full_disk_costs_lines_and_says_how_many() -> None:
    taken: list[bytes] = []
    full = True

    def write(data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken.append(data)
        return len(data)

    sink = Sink(write, b"[rank1]: ")
    sink.put([b"a\n", b"b\n"])
    full = False
    sink.put([b"c\n", b"d\n"])
    assert taken == [b"[rank1]: lines of this rank that could not be written here: 2\n", b"c\n", b"d\n"]


@pytest.mark.parametrize(
    "line",
    [
        *("torch.OutOfMemoryError: CUDA out of memory", "OSError: [Errno 28] No space left on device", "MemoryError"),
        *("NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus", "ib0: link is down"),
        *("ModuleNotFoundError: No module named 'x'", "RuntimeError: Connection closed by peer [10.0.0.1]:1234"),
    ],
)
def test_a_label_changes_nothing_about_what_a_line_is_taken_for(line: str) -> None:
    def classes(text: str) -> tuple[bool, list[object]]:
        hits = [next(cls for p, cls in SIGNATURES if p.search(s.line)) for s in find_signatures(node="n", text=text)]
        return is_cascade(text), hits

    assert classes(f"[rank5]: {line}") == classes(line)
