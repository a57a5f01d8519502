"""Where nodes come from: the only difference between a laptop and a Slurm allocation for the supervisor.

    local   virtual nodes node0 … nodeN-1: process trees of this machine, told apart by PAWL_NODE
    slurm   the nodes of SLURM_JOB_NODELIST: one step of agents for the whole attempt, so that no restart needs Slurm

Each edge starts the agents once, and says what it knows of them for certain; what it cannot know it answers with None.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.agent import proc
from orchestrator.agent.plan import AttemptPlan
from orchestrator.errors import PawlError
from orchestrator.slurm.text import unique_hosts
from orchestrator.state.rundir import RunPaths, safe_name
from orchestrator.words import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeNode:
    """A node of the allocation and the address at which the others reach it."""

    name: str
    address: str


class Edge(Protocol):
    """How the supervisor touches the nodes of its allocation."""

    @property
    def nodes(self) -> tuple[EdgeNode, ...]: ...

    @property
    def own_address(self) -> str:
        """Where agents reach the supervisor."""
        ...

    def start_agents(self, *, port: int) -> dict[str, int]:
        """Start an agent on every node; pids of those that run on this machine, by node. Raises PawlError."""
        ...

    def agent_dead(self, node: str) -> str | None:
        """Certain knowledge that the node's agent is gone, as a sentence; None when it lives or nobody can say."""
        ...

    def clean(self, node: str) -> int | None:
        """End what a lost node left; how many processes could not be ended, None when this edge cannot reach it."""
        ...

    def close(self) -> int | None:
        """End everything of the attempt; how many processes remain, None when unknown."""
        ...


def agent_argv(paths: RunPaths, plan: AttemptPlan, command: Sequence[str], *, connect: str) -> tuple[str, ...]:
    """The agent's command without what differs from node to node."""
    key = paths.channel_key(plan.attempt)
    return (
        *(sys.executable, "-m", "orchestrator", "agent", "--run-dir", str(paths.root)),
        *("--attempt", str(plan.attempt), "--connect", connect, "--key-file", str(key)),
        *(("--", *command) if command else ()),
    )


class LocalEdge:
    """Virtual nodes on this machine. `gone` nodes stay gone: a lost machine does not come back either."""

    def __init__(self, paths: RunPaths, plan: AttemptPlan, command: Sequence[str]) -> None:
        self._paths, self._plan, self._command = paths, plan, tuple(command)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        count = plan.num_nodes + plan.num_spares
        self.nodes = tuple(EdgeNode(name=f"node{i}", address="127.0.0.1") for i in range(count))
        self.own_address = "127.0.0.1"

    def start_agents(self, *, port: int) -> dict[str, int]:
        """One process tree per node, each in a session of its own."""
        argv = agent_argv(self._paths, self._plan, self._command, connect=f"127.0.0.1:{port}")
        for node in self.nodes:
            environment = {**os.environ, "PYTHONSAFEPATH": "1"}
            environment |= {proc.NONCE_KEY: self._plan.nonce, proc.NODE_KEY: node.name}
            at = argv.index("--attempt")
            log = self._paths.attempt(self._plan.attempt) / f"agent-{safe_name(node.name)}.log"
            with log.open("ab") as output:
                self._agents[node.name] = subprocess.Popen(
                    (*argv[:at], "--node", node.name, *argv[at:]),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        return {name: agent.pid for name, agent in self._agents.items()}

    def agent_dead(self, node: str) -> str | None:
        """The agent is our child: its exit is a fact."""
        agent = self._agents.get(node)
        code = None if agent is None else agent.poll()
        if agent is None or code is None:
            return None
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return f"its agent (pid {agent.pid}) ended {how}"

    def clean(self, node: str) -> int | None:
        """SIGKILL what is left of the node."""
        killed = proc.kill_all(lambda: proc.find(nonce=self._plan.nonce, node=node))
        (Path("/dev/shm") / f"pawl-{os.getuid()}-{self._plan.nonce}-{safe_name(node)}").unlink(missing_ok=True)
        return len(killed.remaining)

    def close(self) -> int | None:
        """Wait for the agents that were told to quit, then SIGKILL whatever still carries the nonce."""
        for agent in self._agents.values():
            try:
                agent.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                agent.kill()
        remaining = sum(self.clean(node.name) or 0 for node in self.nodes)
        proc.reap()
        return remaining


def srun_argv(plan: AttemptPlan, agent: Sequence[str], *, nodes: Sequence[str], cpus_per_task: int | None) -> list[str]:
    """The one step of an attempt: an agent on every node of the allocation, spares included.

    --no-kill: losing a node ends neither the step nor the others. --overlap: a step that shares the allocation's CPUs,
    so that Slurm never calls them busy. SRUN_CPUS_PER_TASK is not read by every version: the number is repeated (S6).
    """
    cpus = [] if cpus_per_task is None else [f"--cpus-per-task={cpus_per_task}"]
    return [
        *("srun", "--no-kill", "--overlap", "--export=ALL", "--kill-on-bad-exit=0", "--unbuffered"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", *cpus),
        *(f"--nodelist={','.join(nodes)}", f"--job-name=pawl-{plan.attempt:04d}", "--input=none"),
        *agent,
    ]


class SlurmEdge:
    """The nodes of the Slurm job that this process runs in. Agents learn their node's name from SLURMD_NODENAME."""

    def __init__(
        self, paths: RunPaths, plan: AttemptPlan, command: Sequence[str], *, environ: Mapping[str, str]
    ) -> None:
        hosts = environ.get("SLURM_JOB_NODELIST")
        if not hosts:
            raise PawlError("SLURM_JOB_NODELIST is not set: `--launcher slurm` runs inside a Slurm job only.")
        names = unique_hosts(hosts)
        if len(names) < plan.num_nodes:
            raise PawlError(f"The job has {plural(len(names), 'node')} ({hosts}), a cycle needs {plan.num_nodes}.")
        self._paths, self._plan, self._command = paths, plan, tuple(command)
        self._cpus = int(environ["SLURM_CPUS_PER_TASK"]) if environ.get("SLURM_CPUS_PER_TASK") else None
        self._step: subprocess.Popen[bytes] | None = None
        self.nodes = tuple(EdgeNode(name=name, address=name) for name in names)
        self.own_address = socket.gethostname()

    def start_agents(self, *, port: int) -> dict[str, int]:
        """Start the step; the agents' pids are on other machines."""
        agent = agent_argv(self._paths, self._plan, self._command, connect=f"{self.own_address}:{port}")
        names = [node.name for node in self.nodes]
        argv = srun_argv(self._plan, agent, nodes=names, cpus_per_task=self._cpus)
        environment = {**os.environ, proc.NONCE_KEY: self._plan.nonce, "PYTHONSAFEPATH": "1"}
        try:
            self._step = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
        except OSError as error:
            raise PawlError(f"srun cannot be started: {error}. Is Slurm's client installed on this node?") from error
        return {}

    def agent_dead(self, node: str) -> str | None:
        """One step stands for all agents: only its end is certain knowledge."""
        code = None if self._step is None else self._step.poll()
        return None if code is None else f"the step of agents ended with code {code}"

    def clean(self, node: str) -> int | None:
        """A lost node cannot be reached from here; its agent ends its ranks by itself."""
        return None

    def close(self) -> int | None:
        """Wait for the step to end, then end it."""
        if self._step is None:
            return 0
        try:
            self._step.wait(timeout=15.0)
        except subprocess.TimeoutExpired:
            # srun passes the signal on to its tasks once; a second one would abandon them.
            self._step.send_signal(signal.SIGTERM)
        return None
