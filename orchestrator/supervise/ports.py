"""The address and port at which a cycle's ranks meet.

The port lies outside the kernel's range for outgoing connections: a port inside it can be taken by any client between
our look and torchrun's listen (S12). Each cycle takes a fresh one, so that a late process of the cycle before finds
nobody at home.
"""

import errno
import ipaddress
import random
import socket
from pathlib import Path

from orchestrator.errors import PawlError
from orchestrator.words import plural

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _HIGHEST = 10240, 65535


class NoPort(PawlError):
    """No usable port, or an address at which other nodes cannot meet."""


def ephemeral_range(text: str) -> tuple[int, int]:
    """(first, last) port that the kernel hands to outgoing connections, from ip_local_port_range's text."""
    first, last = (int(word) for word in text.split())
    return first, last


def candidates(*, first: int, last: int) -> tuple[int, ...]:
    """Ports above the well-known ones and outside [first, last]. Falls back to all when that leaves none."""
    outside = tuple(port for port in range(_LOWEST, _HIGHEST + 1) if not first <= port <= last)
    return outside or tuple(range(_LOWEST, _HIGHEST + 1))


def is_free(port: int, *, host: str = "") -> bool:
    """Whether a listener could open this port now (bind probe). Raises OSError for a host that is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # No SO_REUSEADDR: a port in TIME_WAIT or held by another listener must count as taken.
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(*, host: str = "", avoid: frozenset[int] = frozenset(), seed: str | None = None) -> int:
    """A port that can be opened now. `seed` spreads runs apart without making them collide for ever."""
    first, last = ephemeral_range(_RANGE_FILE.read_text())
    choices = [port for port in candidates(first=first, last=last) if port not in avoid]
    random.Random(seed).shuffle(choices)
    for port in choices[:200]:
        if is_free(port, host=host):
            return port
    raise NoPort(f"No free port on {host or 'this machine'}: 200 ports outside {first}–{last} were all taken.")


def check_meeting_address(address: str, *, num_nodes: int, local: bool) -> None:
    """Refuse an address at which the nodes of a cycle cannot meet (S9). Raises NoPort with the reason.

    `local`: all nodes are process trees of this machine, for which loopback is right.
    """
    if not address or address.startswith("-"):
        raise NoPort(f"The first node has no usable address (found {address!r}), so ranks have no place to meet.")
    if num_nodes > 1 and not local and _is_loopback(address):
        raise NoPort(
            f"The first node gives {address} as its address. That is a loopback address: on "
            f"{plural(num_nodes - 1, 'other node')} it means the node itself, so the ranks would wait for ever. "
            "Usually /etc/hosts maps the node's own name to 127.0.x.1 (Debian does). Use the name Slurm lists, or set "
            "the network interface in the site file."
        )


def _is_loopback(address: str) -> bool:
    if address.lower() in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"):
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return _resolves_to_loopback(address)


def _resolves_to_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # Unknown is not loopback: a name only the compute nodes can resolve is legal.
        return False
    return bool(found) and all(ipaddress.ip_address(str(item[4][0]).split("%")[0]).is_loopback for item in found)
