"""The two faults of the demo: a virtual node that dies, and a rank that stops.

A virtual node is every process whose environment carries its name and this run's nonce, wherever it sits in the process
tree (torchrun gives each worker a session of its own).
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil


def nonce_of(run_dir: Path, attempt: int = 1) -> str:
    intent = json.loads((run_dir / "attempts" / f"{attempt:04d}" / "intent.json").read_text())
    return str(intent["nonce"])


def in_rank_order(cycle: dict[str, Any]) -> list[str]:
    """Names of the nodes that train in a cycle: the first holds rank 0. `cycle`: a cycle.json."""
    return [str(node["name"]) for node in sorted(cycle["nodes"], key=lambda node: int(node["node_rank"]))]


def training_nodes(run_dir: Path) -> list[str]:
    """Nodes of the newest cycle in rank order; the spare is wherever the start-up left it. [] before the first."""
    cycles = sorted(run_dir.glob("attempts/*/cycles/*/cycle.json"))
    return in_rank_order(json.loads(cycles[-1].read_text())) if cycles else []


def node_processes(run_dir: Path, node: str) -> list[psutil.Process]:
    """Processes of a virtual node of a local run, oldest first."""
    nonce = nonce_of(run_dir)
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            env = process.environ()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's: not one of ours
        if env.get("PAWL_NONCE") == nonce and env.get("PAWL_NODE") == node:
            found.append(process)
    return sorted(found, key=lambda p: p.pid)


def is_alive(run_dir: Path) -> bool:
    """Whether any process of any attempt of the run still lives."""
    nonces = {json.loads(path.read_text())["nonce"] for path in run_dir.glob("attempts/*/intent.json")}
    for process in psutil.process_iter(["pid"]):
        try:
            if process.environ().get("PAWL_NONCE") in nonces and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's
    return False


def trainer_pid(run_dir: Path, node: str, rank: int) -> int | None:
    """Pid of one rank on a node, by the RANK that torchrun gave it."""
    for process in node_processes(run_dir, node):
        try:
            if process.environ().get("RANK") == str(rank) and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended between the two looks
    return None


def kill_node(run_dir: Path, node: str) -> list[int]:
    """SIGKILL all processes of a virtual node at once, as a power cut would; returns the pids."""
    pids = [p.pid for p in node_processes(run_dir, node)]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # died with its parent
    return pids
