"""The line between two engines: what arrives is what was sent, only from who knows the key of transfers, and
what was changed or repeated on the way is refused."""

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
from workers.overload import channel as channel_module
from workers.overload.channel import (
    Message,
    PeerAsk,
    PeerConnection,
    PeerError,
    PeerRefused,
    PeerServer,
    SealedLine,
    called,
)

SECRET = b"a secret only for these tests"
MARK = b"what nobody else may read"


def test_a_batch_of_most_tokens_is_one_message() -> None:
    most = channel_module.most_batched_tokens(5_120, 2)
    room = channel_module.MAX_TENSORS_BYTES - 2 * most * 5_120 * 2
    assert channel_module.BESIDE_BYTES <= room < channel_module.BESIDE_BYTES + 2 * 5_120 * 2
    assert 8_192 < most < 65_536


def answered(message: Message) -> Message:
    if message.kind is PeerAsk.MOVE:
        raise PeerRefused("not now")
    if message.kind is PeerAsk.RUN:
        raise ValueError("a defect")
    return Message(PeerAsk.DONE, message.epoch, message.values, message.tensors)


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
    """On the way of one connection: keeps what was asked, may change a byte of it or send all of it twice."""

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
    return Message(PeerAsk.PUT, 7, {"rows": [1, 2]}, [torch.frombuffer(bytearray(MARK), dtype=torch.uint8)])


def test_tensors_arrive_as_they_were(server: PeerServer, encrypt: bool) -> None:
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    sent = [
        torch.randn(3, 5, dtype=torch.bfloat16),
        torch.arange(12).view(3, 4).t(),  # not contiguous
        torch.empty(0, 7),
        torch.randn(4, 2, 3),
    ]
    for _ in range(3):
        answer = peer.ask(Message(PeerAsk.PUT, 7, {"rows": [1, 2]}, sent))
        assert (answer.kind, answer.epoch, answer.values) == (PeerAsk.DONE, 7, {"rows": [1, 2]})
        for mine, back in zip(sent, answer.tensors, strict=True):
            assert mine.dtype == back.dtype and torch.equal(mine, back)


def test_a_refusal_says_why_and_the_line_stays(server: PeerServer, encrypt: bool) -> None:
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    with pytest.raises(PeerRefused, match="not now"):
        peer.ask(Message(PeerAsk.MOVE, 1))
    with pytest.raises(PeerRefused, match="a defect"):
        peer.ask(Message(PeerAsk.RUN, 1))
    assert peer.ask(Message(PeerAsk.GET, 1)).kind is PeerAsk.DONE


def test_who_does_not_know_the_key_is_refused(server: PeerServer, encrypt: bool) -> None:
    with pytest.raises(PeerError, match="does not know this fleet's secret"):
        PeerConnection(server.address, b"another secret, as long", 5.0, encrypt=encrypt)


def test_who_encrypts_and_who_does_not_are_not_a_pair(server: PeerServer, encrypt: bool) -> None:
    with pytest.raises(PeerError, match=r"differ in transfer\.encrypt"):
        PeerConnection(server.address, SECRET, 5.0, encrypt=not encrypt)


def test_a_server_that_does_not_know_the_key_is_refused() -> None:
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


def test_a_proof_for_a_transfer_opens_nothing_here(server: PeerServer, encrypt: bool) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as peer:
        channel = wire.Channel(peer)
        challenge, answer = channel.receive_control(wire.Kind.CHALLENGE), wire.nonce()
        mode = b"encrypted" if encrypt else b"clear"
        proof = wire.proof(SECRET, wire.Signer.CONSUMER, challenge, answer, mode)
        channel.send_control(wire.Kind.OPEN, answer + proof + mode)
        with pytest.raises(TransferRefused, match="unauthorised"):
            channel.receive_control(wire.Kind.ACCEPT)


def test_only_encrypted_tensors_cannot_be_read_on_the_way(server: PeerServer, encrypt: bool) -> None:
    relay = Relay(server.address)
    peer = PeerConnection(relay.address, SECRET, 5.0, encrypt=encrypt)
    assert bytes(peer.ask(marked()).tensors[0].numpy()) == MARK
    assert (MARK in relay.asked) is not encrypt


@pytest.mark.parametrize("what", [b"rows", MARK], ids=["header", "tensor"])
def test_what_was_changed_on_the_way_is_not_taken(what: bytes) -> None:
    taken: list[Message] = []
    server = PeerServer("127.0.0.1", SECRET, lambda message: noted(message, taken))
    peer = PeerConnection(Relay(server.address, flip=what).address, SECRET, 5.0)
    with pytest.raises(PeerError, match="does not answer put"):
        peer.ask(marked())
    assert taken == []
    server.close()


def test_what_is_repeated_on_the_way_is_not_taken() -> None:
    taken: list[Message] = []
    server = PeerServer("127.0.0.1", SECRET, lambda message: noted(message, taken))
    peer = PeerConnection(Relay(server.address, repeat=True).address, SECRET, 5.0)
    with pytest.raises(PeerError, match="does not answer get"):
        for _ in range(100):
            peer.ask(Message(PeerAsk.GET, 1))
    assert len(taken) <= 1
    server.close()


def unproved() -> tuple[SealedLine, socket.socket]:
    ours, theirs = socket.socketpair()
    seal = wire.Seal(SECRET, wire.Signer.CONSUMER)
    return SealedLine(ours, seal, seal, encrypt=False), theirs


def test_a_peer_that_dies_is_an_error_at_once() -> None:
    line, theirs = unproved()
    theirs.close()
    with pytest.raises((PeerError, OSError)):
        line.receive(5.0)


def test_lengths_are_bounded() -> None:
    line, theirs = unproved()
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(PeerError, match="none of ours"):
        line.receive(5.0)


def trickle(peer: socket.socket, text: bytes) -> None:
    """A byte now and then: no single wait for it is long."""

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in text:
                peer.sendall(bytes([byte]))
                time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()


def test_a_message_that_comes_a_byte_at_a_time_has_a_limit() -> None:
    line, theirs = unproved()
    trickle(theirs, b"\x40\0\0\0" + bytes(60))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        line.receive(0.5)
    assert time.monotonic() - began < 2


def test_what_is_asked_in_a_phase_has_a_limit_together() -> None:
    def late(message: Message) -> Message:
        time.sleep(0.2)
        return answered(message)

    server = PeerServer("127.0.0.1", SECRET, late)
    peer = PeerConnection(server.address, SECRET, 5.0)
    asked = 0
    end = time.monotonic() + 0.7
    with pytest.raises(PeerError, match="does not answer get"):
        while asked < 50:
            peer.ask(Message(PeerAsk.GET, 1), end)
            asked += 1
    assert asked <= 3
    server.close()


def test_an_answer_to_another_message_is_none() -> None:
    server = PeerServer("127.0.0.1", SECRET, lambda message: Message(PeerAsk.DONE, message.epoch + 1))
    with pytest.raises(PeerError, match="answered get with done of 2"):
        PeerConnection(server.address, SECRET, 5.0).ask(Message(PeerAsk.GET, 1))
    server.close()


def test_who_does_not_finish_the_handshake_makes_room_for_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 1.0)
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
    assert peer.ask(Message(PeerAsk.GET, 1)).kind is PeerAsk.DONE
    for idler in idlers:
        idler.close()
    server.close()


def serving() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "overload"}


def test_a_process_without_a_file_descriptor_left_accepts_later() -> None:
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
            first.connect((host, int(port)))  # has the descriptor that was taken before it was waited for
            peer.connect((host, int(port)))
            time.sleep(0.5)
        finally:
            for one in filled:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        line = called(peer, SECRET, encrypt=False)
        line.send(Message(PeerAsk.GET, 1), 5.0)
        assert line.receive(5.0).kind is PeerAsk.DONE
    server.close()


def test_a_peer_may_be_idle_for_longer_than_a_message_may_take(
    server: PeerServer, encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "HANDSHAKE_S", 0.4)
    monkeypatch.setattr(channel_module, "MESSAGE_S", 0.4)
    peer = PeerConnection(server.address, SECRET, 5.0, encrypt=encrypt)
    for _ in range(2):
        time.sleep(1.0)
        assert peer.ask(Message(PeerAsk.PUT, 1, {"a": 1})).kind is PeerAsk.DONE
    peer.close()
