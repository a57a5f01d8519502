"""What an agent is told: its command line, and the files that it names. All is read and checked before it acts."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.agent.cycle import NodeContext, read_trusted
from orchestrator.agent.plan import AttemptPlan, parse_plan
from orchestrator.errors import PawlError
from orchestrator.state.records import Unreadable
from orchestrator.state.rundir import RunPaths
from orchestrator.supervise import channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An agent's whole knowledge at its start. `address`: its supervisor's (host, port)."""

    plan: AttemptPlan
    context: NodeContext
    address: tuple[str, int]
    key: bytes


def host_port(text: str) -> tuple[str, int]:
    """("node1", 4711) of "node1:4711". Raises PawlError for anything else (S9: an endpoint without a port)."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise PawlError(f"{text!r} is no HOST:PORT; an endpoint needs both.")
    return host.strip("[]"), int(port)


def read_setup(argv: list[str]) -> Setup:
    """From `--run-dir … -- torchrun …`. Raises PawlError and OSError when something cannot be read or trusted."""
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    options = _parser().parse_args(own)
    if not options.node:
        raise PawlError("The agent does not know its node: give --node, or let srun set SLURMD_NODENAME.")
    paths = RunPaths(options.run_dir.absolute())
    plan_file = paths.attempt(options.attempt) / "plan.json"
    plan = parse_plan(read_trusted(plan_file))
    if isinstance(plan, Unreadable):
        raise PawlError(f"{plan_file} cannot be used: {plan.why}.")
    context = NodeContext(
        paths=paths,
        attempt=options.attempt,
        node=options.node,
        nonce=plan.nonce,
        command=tuple(command) or plan.torchrun,
        policy=plan.policy,
        env=plan.env,
        workdir=plan.workdir,
        supervisor_lost_s=plan.supervisor_lost_s,
    )
    return Setup(plan=plan, context=context, address=host_port(options.connect), key=channel.read_key(options.key_file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m orchestrator agent", description="One node's agent of an attempt.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", default=os.environ.get("SLURMD_NODENAME"), help="default: $SLURMD_NODENAME")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT")
    parser.add_argument("--key-file", type=Path, required=True)
    return parser
