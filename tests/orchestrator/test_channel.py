"""The channel drops what it cannot trust, says why, and loses nothing that it can."""

import json
import socket
import stat
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.supervise import channel
from orchestrator.supervise.channel import ChannelError, Codec, Connection, Side

KEY = b"k" * 32


def pair(agent_key=KEY):
    boss, agent = Codec(side=Side.SUPERVISOR, key=KEY), Codec(side=Side.AGENT, key=agent_key)
    boss_hello, agent_hello = boss.greeting(), agent.greeting()
    assert boss.feed(agent_hello) == [] and agent.feed(boss_hello) == []
    return boss, agent


@settings(max_examples=50, deadline=None)
@given(
    bodies=st.lists(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20)), max_size=4)),
    size=st.integers(1, 40),
)
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(bodies, size):
    boss, agent = pair()
    stream = b"".join(agent.seal(body) for body in bodies)
    received = []
    for start in range(0, len(stream), size):
        received += boss.feed(stream[start : start + size])
    assert received == bodies


def test_messages_sealed_before_the_greeting_are_due_after_it():
    boss, agent = Codec(side=Side.SUPERVISOR, key=KEY), Codec(side=Side.AGENT, key=KEY)
    hello = agent.greeting()
    assert agent.seal({"early": 1}) == b"" and agent.due() == b""
    agent.feed(boss.greeting())
    boss.feed(hello)
    assert boss.feed(agent.due()) == [{"early": 1}]


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return left, right


def drain(connection, count):
    messages, deadline = [], time.monotonic() + 5
    while len(messages) < count and connection.closed is None and time.monotonic() < deadline:
        channel.wait(connection, timeout_s=0.1)
        messages += connection.receive()
    return messages


def refused(codec, data, why):
    with pytest.raises(ChannelError, match=why):
        codec.feed(data)


def test_another_key_is_refused():
    boss, agent = pair(agent_key=b"x" * 32)
    refused(boss, agent.seal({"a": 1}), "wrong MAC")
    assert not boss.is_proven


def test_a_replayed_line_is_refused():
    boss, agent = pair()
    line = agent.seal({"a": 1})
    assert boss.feed(line) == [{"a": 1}] and boss.is_proven
    refused(boss, line, "counter 1 after 1")


def test_a_dropped_line_is_noticed():
    boss, agent = pair()
    agent.seal({"lost": 1})
    refused(boss, agent.seal({"a": 2}), "counter 2 after 0")


def test_a_line_of_an_earlier_session_is_refused():
    _, agent = pair()
    line = agent.seal({"a": 1})
    later, _ = pair()
    refused(later, line, "wrong MAC")


def test_a_line_reflected_to_its_sender_is_refused():
    _, agent = pair()
    refused(agent, agent.seal({"a": 1}), "wrong MAC")


def test_a_changed_body_is_refused():
    boss, agent = pair()
    mac, counter, text = json.loads(agent.seal({"cycle": 1}))
    refused(boss, json.dumps([mac, counter, text.replace("1", "2")]).encode() + b"\n", "wrong MAC")


@pytest.mark.parametrize(
    "line", [b"x\n", b"{}\n", b'["a"]\n', b'["a",true,"{}"]\n', b"GET / HTTP/1.1\r\n", b"[" * 5000 + b"\n"]
)
def test_anything_else_is_refused(line):
    boss, _ = pair()
    refused(boss, line, "line")


def test_a_line_without_end_is_refused_at_the_limit():
    boss, _ = pair()
    refused(boss, b"a" * (channel.MAX_LINE_BYTES + 1), "over 65536 bytes")


def test_an_oversized_message_is_refused_by_its_sender():
    _, agent = pair()
    with pytest.raises(ChannelError, match="over the limit"):
        agent.seal({"a": "b" * channel.MAX_LINE_BYTES})


def test_a_connection_over_a_socket_closes_with_a_reason():
    left, right = tcp_pair()
    with left, right:
        boss = Connection(left, side=Side.SUPERVISOR, key=KEY)
        agent = Connection(right, side=Side.AGENT, key=KEY)
        agent.send({"kind": "hello"})
        channel.wait(agent, timeout_s=5)
        agent.receive()
        assert drain(boss, 1) == [{"kind": "hello"}]
        right.send(b"garbage\n")
        assert drain(boss, 1) == []
        assert boss.closed == "dropped: a line that is no JSON"
        assert drain(agent, 1) == []
        assert agent.closed == "the peer closed it"


def test_a_peer_that_reads_nothing_is_dropped():
    left, right = tcp_pair()
    with left, right:
        boss = Connection(left, side=Side.SUPERVISOR, key=KEY)
        agent = Connection(right, side=Side.AGENT, key=KEY)
        agent.send({"kind": "hello"})
        channel.wait(agent, timeout_s=5)
        agent.receive()
        drain(boss, 1)
        for _ in range(200):
            boss.send({"x": "y" * 60000})
        assert boss.closed == "the peer reads nothing"


def test_the_key_file_is_private(tmp_path):
    path = tmp_path / "key"
    key = channel.create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and channel.read_key(path) == key
    with pytest.raises(FileExistsError):
        channel.create_key(path)
    path.chmod(0o640)
    with pytest.raises(ChannelError, match="0600"):
        channel.read_key(path)
