"""The supervisor's side of the channel: one thread that listens, hears and keeps every agent's watch alive.

It does no disk I/O and decides nothing, so a file system that stalls for 90 s makes no agent believe that its
supervisor is dead, and no node look silent: when a message came is noted here, by the monotonic clock. If this thread
itself was held up, the time is taken off everybody's silence.
"""

import contextlib
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass

from orchestrator.agent.messages import Alive, Hello, Message, from_wire, to_wire
from orchestrator.errors import PawlError
from orchestrator.state.records import Unreadable
from orchestrator.supervise import channel
from orchestrator.supervise.say import say

_TICK_S = 0.1
_PROOF_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A message of a node, or None when its connection ended (`why`). `at`: monotonic seconds."""

    node: str
    message: Message | None
    at: float
    why: str = ""


@dataclass(slots=True)
class _Peer:
    connection: channel.Connection
    since: float
    node: str | None = None


class Hub:
    """Connections of all agents of an attempt. `send`, `silence_s` and `connected` may be called from any thread."""

    def __init__(self, *, host: str, key: bytes, attempt: int, nodes: frozenset[str], beat_interval_s: float) -> None:
        self.inbox: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._listener = channel.listen(host=host)
        self.port: int = self._listener.getsockname()[1]
        self._key, self._attempt, self._nodes = key, attempt, nodes
        self._beat_interval_s = beat_interval_s
        self._lock = threading.Lock()
        self._peers: list[_Peer] = []
        self._by_node: dict[str, _Peer] = {}
        self._heard: dict[str, float] = {}
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor-hub", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Write out what is queued (at most a second), close everything."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and self._has_queued():
            time.sleep(0.01)
        self._closing = True
        self._thread.join(timeout=2.0)

    def send(self, node: str, message: Message) -> bool:
        """Queue a message; False when the node is not connected."""
        with self._lock:
            peer = self._by_node.get(node)
            if peer is None or peer.connection.closed is not None:
                return False
            peer.connection.send(to_wire(message))
            return peer.connection.closed is None

    def connected(self, node: str) -> bool:
        """Whether the node's connection is open."""
        with self._lock:
            peer = self._by_node.get(node)
            return peer is not None and peer.connection.closed is None

    def silence_s(self, node: str) -> float | None:
        """Seconds since the last message of the node; None when it never spoke."""
        with self._lock:
            at = self._heard.get(node)
        return None if at is None else max(0.0, time.monotonic() - at)

    def _has_queued(self) -> bool:
        with self._lock:
            return any(peer.connection.wants_write for peer in self._peers)

    def check(self) -> None:
        """Raises PawlError when the listening thread has died: nobody would be heard any more."""
        if self._error is not None:
            raise PawlError(f"The supervisor's channel broke: {self._error!r}.") from self._error

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # told to the loop by check(); a thread must not die unheard
            self._error = error
        with self._lock:
            for peer in self._peers:
                peer.connection.close("the supervisor leaves")
        self._listener.close()

    def _serve(self) -> None:
        last = next_alive = time.monotonic()
        while not self._closing:
            self._wait()
            now = time.monotonic()
            if now - last > 2 * self._beat_interval_s:
                self._forgive(now - last)
            last = now
            self._accept(now)
            self._receive(now)
            if now >= next_alive:
                next_alive = now + self._beat_interval_s
                for node in self._nodes:
                    self.send(node, Alive(generation=1))

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            with self._lock:
                for peer in (peer for peer in self._peers if peer.connection.closed is None):
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.connection.wants_write else 0)
                    selector.register(peer.connection.sock, events)
            selector.select(_TICK_S)

    def _forgive(self, seconds: float) -> None:
        with self._lock:
            self._heard = {node: at + seconds for node, at in self._heard.items()}

    def _accept(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                self._admit(sock, now)

    def _admit(self, sock: socket.socket, now: float) -> None:
        with self._lock:
            self._peers.append(_Peer(channel.Connection(sock, side=channel.Side.SUPERVISOR, key=self._key), now))

    def _receive(self, now: float) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with self._lock:
                bodies = peer.connection.receive()
            for body in bodies:
                self._take(peer, from_wire(body), now)
            if not peer.connection.is_proven and now - peer.since > _PROOF_LIMIT_S:
                self._drop(peer, "no proof of the key in time")
            if peer.connection.closed is not None:
                self._forget(peer, now)

    def _take(self, peer: _Peer, message: Message | Unreadable, now: float) -> None:
        if isinstance(message, Unreadable):
            self._drop(peer, f"dropped: {message.why}")
            return
        if peer.node is None:
            if not isinstance(message, Hello) or message.node not in self._nodes or message.attempt != self._attempt:
                self._drop(peer, "dropped: not an agent of this attempt")
                return
            peer.node = message.node
            with self._lock:
                earlier = self._by_node.get(message.node)
                self._by_node[message.node] = peer
            if earlier is not None:
                self._drop(earlier, "replaced by a new connection")
        with self._lock:
            self._heard[peer.node] = now
        self.inbox.put(Heard(node=peer.node, message=message, at=now))

    def _drop(self, peer: _Peer, why: str) -> None:
        with self._lock:
            peer.connection.close(why)

    def _forget(self, peer: _Peer, now: float) -> None:
        why = peer.connection.closed or ""
        with self._lock:
            if peer in self._peers:
                self._peers.remove(peer)
            current = peer.node is not None and self._by_node.get(peer.node) is peer
        say(f"connection of {peer.node or 'an unknown peer'} ended: {why}")
        if current and peer.node is not None:
            self.inbox.put(Heard(node=peer.node, message=None, at=now, why=why))
