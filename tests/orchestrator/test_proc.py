"""Processes are found by nonce and node, never by name; zombies are dead; a recycled pid is never hit."""

import os
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.agent import proc


def start(nonce, node, code="import time; time.sleep(60)", **options):
    environment = os.environ | {"PAWL_NONCE": nonce, "PAWL_NODE": node}
    return subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, **options)


def until(condition, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


@pytest.fixture
def child():
    process = start("nonce-a", "node1")
    until(lambda: proc.find(nonce="nonce-a"))
    yield process
    process.kill()
    process.wait()


def test_find_goes_by_nonce_and_node(child):
    assert [found.pid for found in proc.find(nonce="nonce-a", node="node1")] == [child.pid]
    assert proc.find(nonce="nonce-a", node="node2") == ()
    assert proc.find(nonce="nonce") == ()


def test_state_stopped_is_seen_and_ends(child):
    (process,) = proc.find(nonce="nonce-a")
    assert proc.send(process, signal.SIGSTOP)
    until(lambda: proc.look(child.pid).is_stopped)
    assert proc.is_alive(child.pid, process.start_ticks)
    proc.send(process, signal.SIGCONT)
    until(lambda: not proc.look(child.pid).is_stopped)


def test_a_zombie_is_dead_and_not_found(child):
    child.kill()
    until(lambda: proc.look(child.pid).state == "Z")
    assert not proc.is_alive(child.pid)
    assert proc.find(nonce="nonce-a") == ()
    child.wait()
    assert proc.look(child.pid) is None


def test_a_pid_with_another_start_time_is_another_process(child):
    (process,) = proc.find(nonce="nonce-a")
    other = proc.Process(pid=process.pid, ppid=process.ppid, state="S", start_ticks=process.start_ticks + 1)
    assert not proc.send(other, signal.SIGKILL)
    assert not proc.is_alive(other.pid, other.start_ticks)
    assert proc.is_alive(process.pid, process.start_ticks)


def test_kill_all_gets_children_in_their_own_sessions():
    code = "import subprocess,sys,time;subprocess.Popen(['sleep','60'],start_new_session=True);time.sleep(60)"
    parent = start("nonce-b", "node1", code)
    until(lambda: len(proc.find(nonce="nonce-b")) == 2)
    killed = proc.kill_all(lambda: proc.find(nonce="nonce-b"))
    parent.wait()
    assert killed.signalled == 2 and killed.remaining == ()
    assert proc.find(nonce="nonce-b") == ()


def test_own_start_ticks_name_this_process():
    assert proc.is_alive(os.getpid(), proc.own_start_ticks())
    assert len(proc.boot_id()) == 36


def test_a_subreaper_adopts_and_reaps_orphans():
    code = (
        "import os, subprocess, sys, time\n"
        "from orchestrator.agent import proc\n"
        "proc.become_subreaper()\n"
        "kept = subprocess.Popen([sys.executable, '-S', '-c', 'raise SystemExit(7)'])\n"
        "shell = subprocess.run(['sh', '-c', 'sleep 0.2 & exit 0'])\n"
        "deadline, count = time.monotonic() + 5, 0\n"
        "while kept.poll() is None: time.sleep(0.01)\n"
        "while count < 1 and time.monotonic() < deadline:\n"
        "    count += proc.reap(frozenset({kept.pid})); time.sleep(0.02)\n"
        "assert count == 1 and kept.returncode == 7, (count, kept.returncode)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
