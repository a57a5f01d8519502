"""Ports outside the ephemeral range; loopback refused where nodes could not meet (case S9)."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.supervise import ports


@given(first=st.integers(1, 65535), last=st.integers(1, 65535))
def test_candidates_avoid_the_ephemeral_range_unless_nothing_else_is_left(first, last):
    found = ports.candidates(first=first, last=last)
    assert found
    outside = [port for port in range(10240, 65536) if not first <= port <= last]
    assert list(found) == (outside or list(range(10240, 65536)))


def test_a_port_with_a_listener_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not ports.is_free(listener.getsockname()[1], host="127.0.0.1")


def test_free_port_can_be_opened_and_is_not_repeated():
    first = ports.free_port(host="127.0.0.1", seed="run")
    second = ports.free_port(host="127.0.0.1", seed="run", avoid=frozenset({first}))
    assert first != second
    with socket.create_server(("127.0.0.1", second)):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_loopback_is_refused_with_the_reason_in_a_job_of_several_nodes(address):
    """S9 (nebius-solutions-library#177, pytorch#79388)."""
    with pytest.raises(ports.NoPort, match=r"loopback.*/etc/hosts"):
        ports.check_meeting_address(address, num_nodes=2, local=False)
    ports.check_meeting_address(address, num_nodes=1, local=False)
    ports.check_meeting_address(address, num_nodes=2, local=True)


def test_a_name_that_resolves_to_loopback_is_refused(monkeypatch):
    """S9 (nebius-solutions-library#177, pytorch#79388)."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(ports.NoPort):
        ports.check_meeting_address("node1", num_nodes=2, local=False)


@pytest.mark.parametrize("address", ["10.0.0.7", "node-of-nowhere.invalid"])
def test_other_addresses_are_accepted(address):
    ports.check_meeting_address(address, num_nodes=2, local=False)


@pytest.mark.parametrize("address", ["", "-oProxyCommand=x"])
def test_no_address_is_an_error_even_for_one_node(address):
    with pytest.raises(ports.NoPort, match="no usable address"):
        ports.check_meeting_address(address, num_nodes=1, local=True)
