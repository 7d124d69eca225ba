"""The line between the workers of two engines: authenticated connections, one request and its answer at a
time, tensors as they lie in memory.

Both ends show that they know the key of transfers, and what follows is sealed, as between ends of a KV
transfer (kvtransfer/transfer/wire.py): every message and every tensor has a tag, under keys of this one
connection, and tensors are encrypted where both are told to (`transfer.encrypt`). Every message names the
epoch of the split that it belongs to.
"""

import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import torch

from kvtransfer.metrics import Reason
from kvtransfer.transfer import wire
from kvtransfer.transfer.peers import Acceptor
from kvtransfer.transfer.wire import TransferRefused
from workers.overload.config import OverloadConfigError
from workers.processes import WorkerError

logger = logging.getLogger("conserve.workers.overload")

PURPOSE = b"overload"  # signed too: a proof for a KV transfer opens no connection here
MODES = {False: b"clear", True: b"encrypted"}  # of tensors
HANDSHAKE_S = 5.0
MESSAGE_S = 30.0  # of a peer's, from its first byte to its last; and of what it is answered
MAX_CONNECTIONS = 64  # each peer has two at most; who is not one stays for a handshake
SILENT_S, LOOKS_S, LOOKS = 15, 5, 3  # a host that is gone without a word is noticed after 30 s
MAX_HEADER = 1 << 20
MAX_TENSORS_BYTES = 1 << 30
BESIDE_BYTES = (
    64 << 20
)  # of them, what a batch has beside its activations: positions, slots, tables of blocks
_LENGTH = struct.Struct("<I")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
}


class PeerError(WorkerError, ConnectionError):
    """The peer is gone, late, or in another state than it must be: both engines have whole models again."""


class PeerRefused(PeerError):
    """The peer answered, and does not do it: it has not come so far."""


class SplitOver(PeerError):
    """The peer answered, and has left this epoch, or was never in it."""


def most_batched_tokens(hidden: int, item_bytes: int) -> int:
    """Of a batch that one message takes: its hidden states and residuals."""
    return (MAX_TENSORS_BYTES - BESIDE_BYTES) // (2 * hidden * item_bytes)


class PeerAsk(StrEnum):
    MEET = "meet"  # answered when the peer has come as far
    PUT = "put"  # KV of the sender's blocks
    RUN = "run"  # a batch of the sender's through layers of the peer's
    MOVE = "move"  # the sender's blocks have other places
    GET = "get"  # KV of the sender's blocks, back
    DONE = "done"
    REFUSED = "refused"


class Header(msgspec.Struct, frozen=True, array_like=True):
    kind: PeerAsk
    epoch: int
    values: dict[str, Any]
    tensors: list[tuple[str, list[int]]]  # data type and shape of each that follows


@dataclass(frozen=True, slots=True)
class Message:
    kind: PeerAsk
    epoch: int
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()


class SealedLine:
    """One end of a connection, after its handshake. A message is a header and the tensors that it describes;
    of its tags the header's is number 0."""

    def __init__(self, peer: socket.socket, out: wire.Seal, back: wire.Seal, encrypt: bool) -> None:
        self._peer, self._out, self._back, self._encrypt = peer, out, back, encrypt

    def send(self, message: Message, limit_s: float) -> None:
        tensors = [tensor.contiguous() for tensor in message.tensors]
        described = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        header = Header(message.kind, message.epoch, dict(message.values), described)
        text = msgspec.msgpack.encode(header)
        head = _LENGTH.pack(len(text)) + text
        self._out.begin()
        views = [memoryview(head), memoryview(self._out.tag(head))]
        for number, content in enumerate(map(_bytes_of, tensors), 1):
            if self._encrypt:
                views.append(memoryview(self._out.encrypt(content, number)))
            else:
                views += [content, memoryview(self._out.tag(content, number))]
        with wire.all_within(self._peer, limit_s) as until:
            wire.send_all(self._peer, views, until)

    def receive(self, limit_s: float) -> Message:
        with wire.all_within(self._peer, limit_s) as until:
            return self._received(until)

    def wait(self) -> None:
        """For the beginning of a message, or the connection's end: a peer may be idle for long."""
        self._peer.settimeout(None)
        self._peer.recv(1, socket.MSG_PEEK)

    def _received(self, until: Callable[[], None]) -> Message:
        start = wire.receive_exactly(self._peer, _LENGTH.size, until)
        (length,) = _LENGTH.unpack(start)
        if length > MAX_HEADER:
            raise PeerError(f"a header of {length} bytes is none of ours")
        text = wire.receive_exactly(self._peer, length, until)
        self._back.begin()
        self._back.check(start + text, wire.receive_exactly(self._peer, wire.TAG_BYTES, until))
        try:
            header = msgspec.msgpack.decode(text, type=Header)
            kinds = [(DTYPES[dtype], shape) for dtype, shape in header.tensors]
        except (msgspec.MsgspecError, KeyError) as error:
            raise PeerError(f"not a message of ours: {error}") from error
        if any(size < 0 for _, shape in kinds for size in shape):
            raise PeerError("not a message of ours: a tensor of less than nothing")
        if sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds) > MAX_TENSORS_BYTES:
            raise PeerError("more bytes than a message of ours has")
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
        self._receive_into([_bytes_of(tensor) for tensor in tensors], until)
        return Message(header.kind, header.epoch, header.values, tensors)

    def _receive_into(self, places: Sequence[memoryview], until: Callable[[], None]) -> None:
        if self._encrypt:
            sealed = [bytearray(place.nbytes + wire.TAG_BYTES) for place in places]
            wire.receive_all(self._peer, [memoryview(one) for one in sealed], until)
            for number, (one, place) in enumerate(zip(sealed, places, strict=True), 1):
                self._back.decrypt(one, number, place)
            return
        tags = [bytearray(wire.TAG_BYTES) for _ in places]
        into = [view for place, tag in zip(places, tags, strict=True) for view in (place, memoryview(tag))]
        wire.receive_all(self._peer, into, until)
        for number, (place, tag) in enumerate(zip(places, tags, strict=True), 1):
            self._back.check(place, bytes(tag), number)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def called(peer: socket.socket, secret: bytes, encrypt: bool) -> SealedLine:
    """The handshake of who connects."""
    channel = wire.Channel(peer)
    with channel.within(HANDSHAKE_S):
        challenge = channel.receive_control(wire.Kind.CHALLENGE)
        answer, mode = wire.nonce(), MODES[encrypt]
        mine = wire.proof(secret, wire.Signer.CONSUMER, PURPOSE, challenge, answer, mode)
        channel.send_control(wire.Kind.OPEN, answer + mine + mode)
        given = channel.receive_control(wire.Kind.ACCEPT)
    if not wire.proves(given, secret, wire.Signer.PRODUCER, PURPOSE, answer, challenge):
        raise TransferRefused(Reason.UNAUTHORISED, "the peer does not know this fleet's secret")
    return _sealed(peer, secret, wire.Signer.CONSUMER, challenge, answer, encrypt)


def answered(peer: socket.socket, secret: bytes, encrypt: bool) -> SealedLine:
    """The handshake of who listens; who is refused is told why."""
    channel, challenge = wire.Channel(peer), wire.nonce()
    channel.send_control(wire.Kind.CHALLENGE, challenge)
    with channel.within(HANDSHAKE_S):
        answer, given, mode = wire.split_open(channel.receive_control(wire.Kind.OPEN))
    try:
        if not wire.proves(given, secret, wire.Signer.CONSUMER, PURPOSE, challenge, answer, mode):
            raise TransferRefused(Reason.UNAUTHORISED, "the peer does not know this fleet's secret")
        if mode != MODES[encrypt]:
            raise TransferRefused(Reason.MAPPING, "the engines differ in transfer.encrypt: start them alike")
    except TransferRefused as refused:
        channel.send_refusal(refused)
        raise
    mine = wire.proof(secret, wire.Signer.PRODUCER, PURPOSE, answer, challenge)
    channel.send_control(wire.Kind.ACCEPT, mine)
    return _sealed(peer, secret, wire.Signer.PRODUCER, challenge, answer, encrypt)


def _sealed(
    peer: socket.socket, secret: bytes, we: wire.Signer, challenge: bytes, answer: bytes, encrypt: bool
) -> SealedLine:
    they = wire.Signer.PRODUCER if we is wire.Signer.CONSUMER else wire.Signer.CONSUMER
    out, back = (wire.Seal(secret, side, PURPOSE, challenge, answer) for side in (we, they))
    return SealedLine(peer, out, back, encrypt)


def _set_up(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOOKS_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOOKS)


class PeerConnection:
    """To the peer's server; used by one thread."""

    def __init__(self, address: str, secret: bytes, limit_s: float, *, encrypt: bool = False) -> None:
        self.address, self._limit_s = address, limit_s
        host, _, port = address.rpartition(":")
        try:
            self._peer = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        except (OSError, ValueError) as error:
            raise PeerError(f"{address} is not reached: {error}") from error
        try:
            _set_up(self._peer)
            self._line = called(self._peer, secret, encrypt)
        except (OSError, TransferRefused) as error:
            self._peer.close()
            raise PeerError(f"{address} is not reached: {error}") from error

    def ask(self, message: Message, end: float = math.inf) -> Message:
        """Its answer, within the limit of each, and by `end`; PeerRefused or SplitOver where it says no,
        PeerError where it says nothing, or where what came is not what was sent."""
        end = min(time.monotonic() + self._limit_s, end)
        try:
            self._line.send(message, end - time.monotonic())
            answer = self._line.receive(end - time.monotonic())
        except (OSError, TransferRefused) as error:
            raise PeerError(f"{self.address} does not answer {message.kind}: {error}") from error
        if answer.kind is PeerAsk.REFUSED:
            refused = SplitOver if answer.values.get("over") else PeerRefused
            raise refused(f"{self.address} refused {message.kind}: {answer.values.get('why')}")
        if (answer.kind, answer.epoch) != (PeerAsk.DONE, message.epoch):
            raise PeerError(f"{self.address} answered {message.kind} with {answer.kind} of {answer.epoch}")
        return answer

    def close(self) -> None:
        self._peer.close()


Answer = Callable[[Message], Message]


class PeerServer:
    """Answers peers: a thread a connection, from the engine's start on."""

    def __init__(self, host: str, secret: bytes, answer: Answer, *, encrypt: bool = False) -> None:
        try:
            listener = socket.create_server((host, 0))
        except OSError as error:
            raise OverloadConfigError(f"the peer server cannot listen on {host}: {error}") from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._secret, self._answer, self._encrypt = secret, answer, encrypt
        self._acceptor = Acceptor(listener, self._serve, MAX_CONNECTIONS, "overload")

    def close(self) -> None:
        self._acceptor.close()

    def _serve(self, peer: socket.socket, address: object) -> None:
        try:
            with peer:
                peer.settimeout(HANDSHAKE_S)
                _set_up(peer)
                line = answered(peer, self._secret, self._encrypt)
                with torch.inference_mode():
                    while True:
                        line.wait()
                        line.send(self._answered(line.receive(MESSAGE_S)), MESSAGE_S)
        except (OSError, TransferRefused) as error:
            logger.info("peer %s left: %s", address, error)

    def _answered(self, message: Message) -> Message:
        try:
            return self._answer(message)
        except (PeerRefused, SplitOver) as refused:
            over = isinstance(refused, SplitOver)
            return Message(PeerAsk.REFUSED, message.epoch, {"why": str(refused), "over": over})
        except Exception as error:  # whatever it is: the peer is told, and goes back to its whole model
            logger.exception("%s of a peer failed", message.kind)
            return Message(PeerAsk.REFUSED, message.epoch, {"why": repr(error)})
