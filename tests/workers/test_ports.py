"""A port counts as free only if a process can listen on it at the engine's address."""

import socket

import pytest

from workers.processes import listen_problem


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["IPv4", "IPv6"]
)
def test_a_taken_port_is_reported_but_a_free_port_is_not(host: str, family: socket.AddressFamily) -> None:
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"{host} is no address of this machine")
    with taken:
        port = taken.getsockname()[1]
        assert "in use" in listen_problem(host, port)
    assert listen_problem(host, port) == ""
