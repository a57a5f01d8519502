"""`python -m trainer mesh`: prints which rank sits where, its groups and its node."""

import argparse

from trainer.mesh.topology import Axis, Topology


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"size of the {axis} axis")
    parser.add_argument("--ranks-per-node", type=int, default=None, help="ranks on one node (default: all on one)")


def render(topology: Topology, ranks_per_node: int) -> str:
    """One line per rank: coordinates, node, and its tp, pp and dp groups."""
    header = f"{'rank':>4}  {'dp':>3} {'pp':>3} {'tp':>3}  {'node':>4}  tp group · pp group · dp group"
    lines = [f"{topology.world_size} ranks = dp {topology.dp} · pp {topology.pp} · tp {topology.tp}", header]
    for rank in range(topology.world_size):
        at = topology.coord(rank)
        groups = " · ".join(str(list(topology.ranks_along(axis, rank))) for axis in (Axis.TP, Axis.PP, Axis.DP))
        lines.append(f"{rank:>4}  {at.dp:>3} {at.pp:>3} {at.tp:>3}  {rank // ranks_per_node:>4}  {groups}")
    return "\n".join(lines)


def main(args: argparse.Namespace) -> int:
    try:
        topology = Topology(dp=args.dp, pp=args.pp, tp=args.tp)
        per_node = topology.world_size if args.ranks_per_node is None else args.ranks_per_node
        if per_node < 1 or topology.world_size % per_node:
            raise ValueError(
                f"{topology.world_size} ranks do not fill nodes of {per_node}; set --ranks-per-node to a divisor."
            )
    except ValueError as error:
        print(f"mesh: {error}")
        return 2
    print(render(topology, per_node))
    return 0
