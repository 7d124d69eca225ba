"""Connections between engines are authenticated, sealed, and limited in time."""

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from kvtransfer.transfer import wire
from kvtransfer.transfer.wire import TransferRefused
from workers.engine.overload.split import peer_link
from workers.engine.overload.split.peer_link import (
    Message,
    MessageKind,
    PeerChannel,
    PeerConnection,
    PeerError,
    PeerRefused,
    PeerServer,
    connect_handshake,
)

SECRET = b"a secret only for these tests"
MARK = b"what nobody else may read"


def test_the_largest_batch_fits_into_one_message() -> None:
    most = peer_link.most_batched_tokens(5_120, 2)
    room = peer_link.MAX_TENSORS_BYTES - 2 * most * 5_120 * 2
    assert peer_link.BATCH_TABLES_BYTES <= room < peer_link.BATCH_TABLES_BYTES + 2 * 5_120 * 2
    assert 8_192 < most < 65_536


def answered(message: Message) -> Message:
    if message.kind is MessageKind.MEET:
        raise PeerRefused("not now")
    if message.kind is MessageKind.RUN:
        raise ValueError("a defect")
    return Message(MessageKind.DONE, message.epoch, message.values, message.tensors)


def noted(message: Message, taken: list[Message]) -> Message:
    taken.append(message)
    return answered(message)


@pytest.fixture(params=[False, True], ids=["in clear", "encrypted"])
def encrypt(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def server(encrypt: bool) -> Iterator[PeerServer]:
    made = PeerServer("127.0.0.1", SECRET, answered, encrypt=encrypt)
    yield made
    made.close()


class Relay:
    """Man in the middle of one connection: records requests, and may change a byte or repeat a message."""

    def __init__(self, target: str, flip: bytes = b"", repeat: bool = False) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._flip, self._repeat = (host, int(port)), flip, repeat
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        caller, _ = self._listener.accept()
        with (
            contextlib.suppress(OSError),
            caller,
            socket.create_connection(self._target) as server,
        ):
            threading.Thread(target=self._back, args=(server, caller), daemon=True).start()
            while data := caller.recv(1 << 20):
                self.asked += data
                if self._flip and (at := data.find(self._flip)) >= 0:
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                server.sendall(data * (2 if self._repeat and len(self.asked) > len(data) else 1))

    def _back(self, server: socket.socket, caller: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who asked has left
            while data := server.recv(1 << 20):
                caller.sendall(data)
            caller.shutdown(socket.SHUT_RDWR)


def marked() -> Message:
    return Message(
        MessageKind.PUT, 7, {"rows": [1, 2]}, [torch.frombuffer(bytearray(MARK), dtype=torch.uint8)]
    )


def test_tensors_arrive_unchanged(server: PeerServer, encrypt: bool) -> None:
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    sent = [
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.arange(12).view(3, 4).t(),  # not contiguous
        torch.empty(0, 7),
        torch.randn(4, 2, 3),
    ]
    for _ in range(3):
        answer = peer.request(Message(MessageKind.PUT, 7, {"rows": [1, 2]}, sent))
        assert (answer.kind, answer.epoch, answer.values) == (MessageKind.DONE, 7, {"rows": [1, 2]})
        for mine, back in zip(sent, answer.tensors, strict=True):
            assert mine.dtype == back.dtype and torch.equal(mine, back)


def test_a_refusal_carries_its_reason_and_keeps_the_connection(server: PeerServer, encrypt: bool) -> None:
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    with pytest.raises(PeerRefused, match="not now"):
        peer.request(Message(MessageKind.MEET, 1))
    with pytest.raises(PeerRefused, match="a defect"):
        peer.request(Message(MessageKind.RUN, 1))
    assert peer.request(Message(MessageKind.GET, 1)).kind is MessageKind.DONE


def test_a_client_with_another_key_is_refused(server: PeerServer, encrypt: bool) -> None:
    with pytest.raises(PeerError, match="does not know this fleet's secret"):
        PeerConnection(server.address, b"another secret, as long", 5.0, encrypt=encrypt)


def test_engines_that_differ_in_encryption_are_refused(server: PeerServer, encrypt: bool) -> None:
    with pytest.raises(PeerError, match=r"differ in transfer\.encrypt"):
        PeerConnection(server.address, SECRET, 5.0, encrypt=not encrypt)


def test_a_server_with_another_key_is_refused() -> None:
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = impostor.accept()
        with peer:
            channel = wire.Channel(peer)
            channel.send_control(wire.Kind.CHALLENGE, bytes(32))
            channel.receive_control(wire.Kind.OPEN)
            channel.send_control(wire.Kind.ACCEPT, bytes(32))

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(PeerError, match="does not know this fleet's secret"):
        PeerConnection(f"127.0.0.1:{impostor.getsockname()[1]}", SECRET, 5.0)
    impostor.close()


def test_a_proof_for_a_kv_transfer_opens_no_connection_between_peers(
    server: PeerServer, encrypt: bool
) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as peer:
        channel = wire.Channel(peer)
        challenge, answer = channel.receive_control(wire.Kind.CHALLENGE), wire.nonce()
        mode = b"encrypted" if encrypt else b"clear"
        proof = wire.proof(SECRET, wire.Signer.CONSUMER, challenge, answer, mode)
        channel.send_control(wire.Kind.OPEN, answer + proof + mode)
        with pytest.raises(TransferRefused, match="unauthorised"):
            channel.receive_control(wire.Kind.ACCEPT)


def test_only_encrypted_tensors_are_unreadable_in_transit(server: PeerServer, encrypt: bool) -> None:
    relay = Relay(server.address)
    peer = PeerConnection(relay.address, SECRET, 5.0, encrypt=encrypt)
    assert bytes(peer.request(marked()).tensors[0].numpy()) == MARK
    assert (MARK in relay.asked) is not encrypt


@pytest.mark.parametrize("what", [b"rows", MARK], ids=["header", "tensor"])
def test_a_message_changed_in_transit_is_rejected(what: bytes) -> None:
    taken: list[Message] = []
    server = PeerServer("127.0.0.1", SECRET, lambda message: noted(message, taken))
    peer = PeerConnection(Relay(server.address, flip=what).address, SECRET, 5.0)
    with pytest.raises(PeerError, match="does not answer put"):
        peer.request(marked())
    assert taken == []
    server.close()


def test_a_message_repeated_in_transit_is_rejected() -> None:
    taken: list[Message] = []
    server = PeerServer("127.0.0.1", SECRET, lambda message: noted(message, taken))
    peer = PeerConnection(Relay(server.address, repeat=True).address, SECRET, 5.0)
    with pytest.raises(PeerError, match="does not answer get"):
        for _ in range(100):
            peer.request(Message(MessageKind.GET, 1))
    assert len(taken) <= 1
    server.close()


def unproved() -> tuple[PeerChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    seal = wire.Seal(SECRET, wire.Signer.CONSUMER, encrypt=False)
    return PeerChannel(ours, seal, seal), theirs


def test_receiving_from_a_closed_connection_is_an_error() -> None:
    line, theirs = unproved()
    theirs.close()
    with pytest.raises((PeerError, OSError)):
        line.receive(5.0)


def test_a_header_that_is_too_long_is_rejected() -> None:
    line, theirs = unproved()
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerError, match="is too long"):
        line.receive(5.0)


def trickle(peer: socket.socket, text: bytes) -> None:
    """Send `text` byte by byte with short pauses, so that no single wait of the receiver is long."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in text:
                peer.sendall(bytes([byte]))
                time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()


def test_a_message_that_trickles_in_times_out() -> None:
    line, theirs = unproved()
    trickle(theirs, b"\x40\0\0\0" + bytes(60))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        line.receive(0.5)
    assert time.monotonic() - began < 2


def test_requests_of_one_order_share_a_deadline() -> None:
    def late(message: Message) -> Message:
        time.sleep(0.2)
        return answered(message)

    server = PeerServer("127.0.0.1", SECRET, late)
    peer = PeerConnection(server.address, SECRET, 5.0)
    asked = 0
    end = time.monotonic() + 0.7
    with pytest.raises(PeerError, match="does not answer get"):
        while asked < 50:
            peer.request(Message(MessageKind.GET, 1), end)
            asked += 1
    assert asked <= 3
    server.close()


def test_an_answer_of_another_epoch_is_an_error() -> None:
    server = PeerServer("127.0.0.1", SECRET, lambda message: Message(MessageKind.DONE, message.epoch + 1))
    with pytest.raises(PeerError, match="answered get with done of 2"):
        PeerConnection(server.address, SECRET, 5.0).request(Message(MessageKind.GET, 1))
    server.close()


def test_peers_connect_after_unfinished_handshakes_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_link, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(peer_link, "HANDSHAKE_S", 1.0)
    server = PeerServer("127.0.0.1", SECRET, answered)
    host, _, port = server.address.rpartition(":")
    before = serving()
    idlers = [socket.create_connection((host, int(port))) for _ in range(4)]
    for idler in idlers:
        trickle(idler, struct.pack("<BBHIIQ", wire.Kind.OPEN, wire.VERSION, 0, 0, 400, 0) + bytes(400))
    time.sleep(0.5)
    assert len(serving() - before) == 2
    began = time.monotonic()
    while True:
        with contextlib.suppress(PeerError):
            peer = PeerConnection(server.address, SECRET, 5.0)
            break
        assert time.monotonic() - began < 10
    assert peer.request(Message(MessageKind.GET, 1)).kind is MessageKind.DONE
    for idler in idlers:
        idler.close()
    server.close()


def serving() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "overload"}


def test_a_server_that_lacked_file_descriptors_accepts_connections_later() -> None:
    server = PeerServer("127.0.0.1", SECRET, answered)
    host, _, port = server.address.rpartition(":")
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled: list[int] = []
    with socket.socket() as first, socket.socket() as peer:
        peer.settimeout(5.0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, usual[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    filled.append(os.dup(peer.fileno()))
            first.connect((host, int(port)))  # accept() reserved a descriptor for it before blocking
            peer.connect((host, int(port)))
            time.sleep(0.5)
        finally:
            for one in filled:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        line = connect_handshake(peer, SECRET, encrypt=False)
        line.send(Message(MessageKind.GET, 1), 5.0)
        assert line.receive(5.0).kind is MessageKind.DONE
    server.close()


def test_a_peer_may_be_idle_between_messages(
    server: PeerServer, encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "HANDSHAKE_S", 0.4)
    monkeypatch.setattr(peer_link, "MESSAGE_S", 0.4)
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    for _ in range(2):
        time.sleep(1.0)
        assert peer.request(Message(MessageKind.PUT, 1, {"a": 1})).kind is MessageKind.DONE
    peer.close()
