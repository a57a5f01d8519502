"""The channel between supervisor and agents: JSON lines over TCP, each with a counter and an HMAC.

    supervisor ─▶ agent   ["<32 hex>"]                        its half of the session's salt
    agent ─▶ supervisor   ["<32 hex>"]                        the other half
    both ways             ["<mac>", 1, "<json object>"]       then 2, 3, … in each direction

The key lies in a 0600 file in the attempt's directory and never travels. Each direction has its own MAC key, derived
from the file's key and both halves of the salt, so a line recorded yesterday, or in the other direction, does not
verify today. A line that is too long, out of order, or wrong in its MAC ends the connection, and the reason is said:
nothing in it is used. Bodies are JSON objects and nothing else; there is no pickle here.
"""

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.errors import PawlError
from orchestrator.state.fsio import read_own

MAX_LINE_BYTES = 64 * 1024
_SALT_BYTES = 16
_MAX_PENDING_BYTES = 4 * 1024 * 1024

Message = dict[str, Any]


class ChannelError(PawlError):
    """The peer broke the protocol, or is not ours; the connection must be dropped."""


class Side(StrEnum):
    """Which end of the channel one is."""

    SUPERVISOR = "supervisor"
    AGENT = "agent"

    @property
    def other(self) -> "Side":
        return Side.AGENT if self is Side.SUPERVISOR else Side.SUPERVISOR


def create_key(path: Path) -> bytes:
    """Make the attempt's key file (0600, never overwritten) and return the key."""
    key = secrets.token_bytes(32)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(key.hex())
    return key


def read_key(path: Path) -> bytes:
    """The key. Raises FileNotFoundError, and ChannelError when others could have read or written it or it is none."""
    try:
        return bytes.fromhex(read_own(path, private=True))
    except PawlError as error:
        raise ChannelError(f"{error} The channel cannot be trusted.") from error
    except ValueError:
        raise ChannelError(f"{path} holds no key: expected hexadecimal digits.") from None


class Codec:
    """One end of one connection as bytes in, messages out; no socket, no clock.

    `feed` raises ChannelError at the first line that does not verify; after that the codec is of no more use.
    """

    def __init__(self, *, side: Side, key: bytes) -> None:
        self._side = side
        self._key = key
        self._salt = secrets.token_hex(_SALT_BYTES)
        self._send_key: bytes | None = None
        self._receive_key = b""
        self._sent = 0
        self._received = 0
        self._buffer = b""
        self._waiting: list[Message] = []

    def greeting(self) -> bytes:
        """The first bytes to send: this end's half of the salt."""
        return json.dumps([self._salt]).encode() + b"\n"

    @property
    def is_proven(self) -> bool:
        """Whether the peer has shown that it holds the key."""
        return self._received > 0

    def seal(self, body: Message) -> bytes:
        """The line for a message, or b"" while the peer's salt is not here yet (see `due`)."""
        if self._send_key is None:
            self._waiting.append(body)
            return b""
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        self._sent += 1
        line = (
            json.dumps([_mac(self._send_key, self._sent, text), self._sent, text], separators=(",", ":")).encode()
            + b"\n"
        )
        if len(line) > MAX_LINE_BYTES:
            raise ChannelError(f"A message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}.")
        return line

    def due(self) -> bytes:
        """Lines for messages that were sealed before the salt came."""
        if self._send_key is None:
            return b""
        waiting, self._waiting = self._waiting, []
        return b"".join(self.seal(body) for body in waiting)

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by these bytes. Raises ChannelError on the first line that must not be trusted."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES or any(len(line) >= MAX_LINE_BYTES for line in lines):
            raise ChannelError(f"a line over {MAX_LINE_BYTES} bytes")
        return [message for line in lines if (message := self._line(line)) is not None]

    def _line(self, line: bytes) -> Message | None:
        try:
            parts = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError("a line that is no JSON") from None
        if not isinstance(parts, list):
            raise ChannelError("a line of another protocol")
        if self._send_key is None:
            self._greet(parts)
            return None
        return self._open(parts)

    def _greet(self, parts: list[Any]) -> None:
        if len(parts) != 1 or not isinstance(parts[0], str) or len(parts[0]) != 2 * _SALT_BYTES:
            raise ChannelError("no greeting")
        salts = {self._side: self._salt, self._side.other: parts[0]}
        salt = f"{salts[Side.SUPERVISOR]}{salts[Side.AGENT]}"
        self._send_key = _derive(self._key, self._side, salt)
        self._receive_key = _derive(self._key, self._side.other, salt)

    def _open(self, parts: list[Any]) -> Message:
        if len(parts) != 3 or not (isinstance(parts[0], str) and type(parts[1]) is int and isinstance(parts[2], str)):
            raise ChannelError("a line of another protocol")
        mac, counter, text = parts
        if not hmac.compare_digest(mac.encode(), _mac(self._receive_key, counter, text).encode()):
            raise ChannelError("a wrong MAC")
        if counter != self._received + 1:
            raise ChannelError(f"counter {counter} after {self._received}")
        self._received = counter
        body = json.loads(text)
        if not isinstance(body, dict):
            raise ChannelError("a message that is no object")
        return body


def _derive(key: bytes, side: Side, salt: str) -> bytes:
    return hmac.new(key, f"pawl-channel-1/{side}/{salt}".encode(), hashlib.sha256).digest()


def _mac(key: bytes, counter: int, text: str) -> str:
    return hmac.new(key, f"{counter}\n{text}".encode(), hashlib.sha256).hexdigest()


class Connection:
    """A non-blocking socket with a codec: `receive` and `send` never wait. `closed` says why it ended, or is None."""

    def __init__(self, sock: socket.socket, *, side: Side, key: bytes) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.closed: str | None = None
        self._codec = Codec(side=side, key=key)
        self._out = self._codec.greeting()
        self.flush()

    @property
    def is_proven(self) -> bool:
        return self._codec.is_proven

    @property
    def wants_write(self) -> bool:
        return bool(self._out) and self.closed is None

    def send(self, message: Message) -> None:
        """Queue a message and write what the socket takes. A peer that reads nothing for 4 MiB is dropped."""
        if self.closed is not None:
            return
        self._out += self._codec.seal(message)
        if len(self._out) > _MAX_PENDING_BYTES:
            self.close("the peer reads nothing")
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now."""
        while self._out and self.closed is None:
            try:
                written = self.sock.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.close(f"send failed: {error.strerror}")
                return
            self._out = self._out[written:]

    def receive(self) -> list[Message]:
        """Messages that are here. Ends the connection on EOF, on an error and on anything that does not verify."""
        messages: list[Message] = []
        while self.closed is None:
            try:
                data = self.sock.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.close(f"receive failed: {error.strerror}")
                break
            if not data:
                self.close("the peer closed it")
                break
            try:
                messages += self._codec.feed(data)
            except ChannelError as error:
                self.close(f"dropped: {error}")
                break
            self._out += self._codec.due()
        self.flush()
        return messages

    def close(self, why: str) -> None:
        """End it; the first reason stays."""
        if self.closed is None:
            self.closed = why
            self.sock.close()


def listen(*, host: str) -> socket.socket:
    """A non-blocking listener on a port of the kernel's choice: agents are told it, nobody needs to guess."""
    listener = socket.create_server((host, 0), backlog=512)
    listener.setblocking(False)
    return listener


def connect(address: tuple[str, int], *, key: bytes, timeout_s: float) -> Connection:
    """The agent's connection to its supervisor. Raises OSError when nobody answers within `timeout_s`."""
    return Connection(socket.create_connection(address, timeout=timeout_s), side=Side.AGENT, key=key)


def wait(connection: Connection | None, *, timeout_s: float) -> None:
    """Sleep until the connection has something to read, can take what is queued, or the time is over."""
    with selectors.DefaultSelector() as selector:
        if connection is not None and connection.closed is None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            selector.register(connection.sock, events)
        selector.select(timeout_s)
