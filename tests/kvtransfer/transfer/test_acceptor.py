"""The acceptor continues after a failed connection."""

import contextlib
import socket
import threading
import time

import pytest

from kvtransfer.transfer.peers import Acceptor


def echo(peer: socket.socket, address: object) -> None:
    with peer:
        peer.sendall(peer.recv(16))


def asked(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(b"hello")
        return peer.recv(16)


def test_the_acceptor_accepts_again_once_the_process_can_start_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor, port = Acceptor(listener, echo, 1, "echo"), int(listener.getsockname()[1])
    usual, refused = threading.Thread.start, [1, 2]

    def start(thread: threading.Thread) -> None:
        if thread.name == "echo" and refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        usual(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in (1, 2):  # the only connection is free again each time
        with contextlib.suppress(ConnectionResetError):
            assert asked(port) == b""
    assert asked(port) == b"hello" and not refused
    acceptor.close()


def test_an_exception_of_a_handler_does_not_stop_the_acceptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    failing = [1, 2, 3]

    def serve(peer: socket.socket, address: object) -> None:
        if failing:
            failing.pop()
            peer.close()
            raise ValueError("a defect")
        echo(peer, address)

    listener = socket.create_server(("127.0.0.1", 0))
    acceptor, port = Acceptor(listener, serve, 2, "echo"), int(listener.getsockname()[1])
    while failing:
        with contextlib.suppress(ConnectionResetError):
            assert asked(port) == b""
    assert asked(port) == b"hello"
    acceptor.close()
    for thread in threading.enumerate():
        if thread.name == "echo":
            thread.join(10)  # what it raises is for this test's hook


def test_a_closed_acceptor_accepts_no_connection() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor, port = Acceptor(listener, echo, 2, "closed"), int(listener.getsockname()[1])
    assert asked(port) == b"hello"
    acceptor.close()
    for _ in range(100):
        if not any(thread.name == "closed-accept" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        asked(port)
