"""Connections between the workers of two engines, for one request and answer with tensors at a time.

Both ends prove that they know the fleet's transfer key, with the handshake of a KV transfer
(kvtransfer/transfer/wire.py). After that, headers and tensors are authenticated by tags under keys of this
connection. Tensors are encrypted if both engines have `transfer.encrypt`. Every message names the epoch of
its split.
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
from workers.engine.overload.config import OverloadConfigError
from workers.processes import WorkerError

logger = logging.getLogger("conserve.workers.overload")

PURPOSE = b"overload"  # part of the proof, so that the proof of a KV transfer is not valid here
MODES = {False: b"clear", True: b"encrypted"}  # of tensors
HANDSHAKE_S = 5.0
MESSAGE_S = 30.0  # limit for receiving a request from its first byte on, and for sending the answer
MAX_CONNECTIONS = 64  # a peer needs one connection; a stranger holds one until the handshake's limit
# A host that vanished is noticed after 30 s.
KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
MAX_HEADER = 1 << 20
MAX_TENSORS_BYTES = 1 << 30
BATCH_TABLES_BYTES = 64 << 20  # share of these bytes for a batch's positions, slots and block tables
_LENGTH = struct.Struct("<I")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
}


class PeerError(WorkerError, ConnectionError):
    """Error: the peer is gone, late or in an unexpected state, so that the split cannot continue."""


class PeerRefused(PeerError):
    """Error: a member's request is refused because it is malformed or comes in the wrong phase."""


class SplitEnded(PeerError):
    """Error: the split of a request is over on the peer, or the peer never took part in it."""


def most_batched_tokens(hidden: int, item_bytes: int) -> int:
    """Return the largest batch whose hidden states and residuals fit into one message."""
    return (MAX_TENSORS_BYTES - BATCH_TABLES_BYTES) // (2 * hidden * item_bytes)


class MessageKind(StrEnum):
    MEET = "meet"  # asks for an answer when the peer has reached a phase
    PUT = "put"  # asks the peer to store KV of the sender's blocks
    RUN = "run"  # asks the peer to compute a batch of the sender through its layers
    GET = "get"  # asks for the KV of the sender's blocks
    DONE = "done"
    REFUSED = "refused"


class Header(msgspec.Struct, frozen=True, array_like=True):
    kind: MessageKind
    epoch: int
    values: dict[str, Any]
    tensors: list[tuple[str, list[int]]]  # data type and shape of each tensor that follows


@dataclass(frozen=True, slots=True)
class Message:
    kind: MessageKind
    epoch: int
    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[torch.Tensor] = ()


class PeerChannel:
    """One end of a connection after the handshake.

    A message is a header with its tag, and then all tensors with one tag. It is sent in as few system calls
    as possible, because each call may give the interpreter to another thread.
    """

    def __init__(self, peer: socket.socket, sending: wire.Seal, receiving: wire.Seal) -> None:
        self._peer, self._sending, self._receiving = peer, sending, receiving

    def send(self, message: Message, limit_s: float) -> None:
        tensors = [tensor.contiguous() for tensor in message.tensors]
        described = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
        header = Header(message.kind, message.epoch, dict(message.values), described)
        text = msgspec.msgpack.encode(header)
        start, seal = _LENGTH.pack(len(text)) + text, self._sending
        views: Sequence[memoryview] = list(map(_bytes_of, tensors))
        seal.begin()
        start += seal.tag(start)
        if views:
            tag, views = seal.seal_blocks(views)
            start += tag
        with wire.all_within(self._peer, limit_s) as until:
            wire.send_all(self._peer, [memoryview(start), *views], until)

    def receive(self, limit_s: float) -> Message:
        with wire.all_within(self._peer, limit_s) as until:
            start = wire.receive_exactly(self._peer, _LENGTH.size, until)
            (length,) = _LENGTH.unpack(start)
            if length > MAX_HEADER:
                raise PeerError(f"header of {length} bytes is too long")
            received = wire.receive_exactly(self._peer, length + wire.TAG_BYTES, until)
            text, seal = received[:length], self._receiving
            seal.begin()
            seal.check(start + text, received[length:])
            header, tensors = _decoded(text)
            if tensors:
                tag, views = bytearray(wire.TAG_BYTES), list(map(_bytes_of, tensors))
                wire.receive_all(self._peer, [memoryview(tag), *views], until)
                seal.open_blocks(views, bytes(tag))
            return Message(header.kind, header.epoch, header.values, tensors)

    def wait(self) -> None:
        """Wait without limit for a message to begin or the connection to end."""
        self._peer.settimeout(None)
        self._peer.recv(1, socket.MSG_PEEK)


def _decoded(text: bytes) -> tuple[Header, list[torch.Tensor]]:
    """Return the decoded header, and uninitialised tensors for the data that follows it."""
    try:
        header = msgspec.msgpack.decode(text, type=Header)
        kinds = [(DTYPES[dtype], shape) for dtype, shape in header.tensors]
    except (msgspec.MsgspecError, KeyError) as error:
        raise PeerError(f"malformed message: {error}") from error
    if any(size < 0 for _, shape in kinds for size in shape):
        raise PeerError("malformed message: negative tensor size")
    if sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds) > MAX_TENSORS_BYTES:
        raise PeerError(f"tensors of a message exceed {MAX_TENSORS_BYTES} bytes")
    return header, [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


def connect_handshake(peer: socket.socket, secret: bytes, encrypt: bool) -> PeerChannel:
    """Authenticate as the connecting side, and return the channel."""
    channel = wire.Channel(peer)
    with channel.within(HANDSHAKE_S):
        nonces = channel.ask(secret, MODES[encrypt], PURPOSE)
    consumer, producer = _seals(secret, nonces, encrypt)
    return PeerChannel(peer, consumer, producer)


def accept_handshake(peer: socket.socket, secret: bytes, encrypt: bool) -> PeerChannel:
    """Authenticate as the listening side, and return the channel; tell a refused peer the reason."""

    def check(mode: bytes) -> None:
        if mode != MODES[encrypt]:
            raise TransferRefused(Reason.MAPPING, "the engines differ in transfer.encrypt: start them alike")

    channel = wire.Channel(peer)
    try:
        with channel.within(HANDSHAKE_S):
            _, nonces = channel.answer(secret, PURPOSE, check=check)
    except TransferRefused as refused:
        channel.send_refusal(refused)
        raise
    consumer, producer = _seals(secret, nonces, encrypt)
    return PeerChannel(peer, producer, consumer)


def _seals(secret: bytes, nonces: tuple[bytes, bytes], encrypt: bool) -> tuple[wire.Seal, wire.Seal]:
    """Return the seals, which tag and encrypt messages, of the connecting and of the listening side."""
    sides = wire.Signer.CONSUMER, wire.Signer.PRODUCER
    consumer, producer = (wire.Seal(secret, side, PURPOSE, *nonces, encrypt=encrypt) for side in sides)
    return consumer, producer


def _set_options(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


class PeerConnection:
    """Client side of a connection to a peer's server, for one thread."""

    def __init__(self, address: str, secret: bytes, limit_s: float, *, encrypt: bool = False) -> None:
        self.address, self._limit_s = address, limit_s
        host, _, port = address.rpartition(":")
        try:
            self._peer = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        except (OSError, ValueError) as error:
            raise PeerError(f"cannot connect to {address}: {error}") from error
        try:
            _set_options(self._peer)
            self._line = connect_handshake(self._peer, secret, encrypt)
        except (OSError, TransferRefused) as error:
            self._peer.close()
            raise PeerError(f"cannot connect to {address}: {error}") from error

    def request(self, message: Message, end: float = math.inf) -> Message:
        """Send a message and return the answer, within the limit of one message and before `end`.

        Raises PeerRefused or SplitEnded if the peer refuses, and PeerError if it does not answer or if the
        answer is damaged.
        """
        end = min(time.monotonic() + self._limit_s, end)
        try:
            self._line.send(message, end - time.monotonic())
            answer = self._line.receive(end - time.monotonic())
        except (OSError, TransferRefused) as error:
            raise PeerError(f"{self.address} does not answer {message.kind}: {error}") from error
        if answer.kind is MessageKind.REFUSED:
            refused = SplitEnded if answer.values.get("ended") else PeerRefused
            raise refused(f"{self.address} refused {message.kind}: {answer.values.get('why')}")
        if (answer.kind, answer.epoch) != (MessageKind.DONE, message.epoch):
            raise PeerError(f"{self.address} answered {message.kind} with {answer.kind} of {answer.epoch}")
        return answer

    def close(self) -> None:
        self._peer.close()


Answer = Callable[[Message], Message]


class PeerServer:
    """Server for the requests of peers, with one thread per connection. It runs from the engine's start."""

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
                _set_options(peer)
                line = accept_handshake(peer, self._secret, self._encrypt)
                with torch.inference_mode():
                    while True:
                        line.wait()
                        line.send(self._answered(line.receive(MESSAGE_S)), MESSAGE_S)
        except (OSError, TransferRefused) as error:
            logger.info("peer %s disconnected: %s", address, error)

    def _answered(self, message: Message) -> Message:
        try:
            return self._answer(message)
        except (PeerRefused, SplitEnded) as refused:
            ended = isinstance(refused, SplitEnded)
            return Message(MessageKind.REFUSED, message.epoch, {"why": str(refused), "ended": ended})
        except Exception as error:  # the peer must learn of any failure, to restore its whole model
            logger.exception("request %s of a peer failed", message.kind)
            return Message(MessageKind.REFUSED, message.epoch, {"why": repr(error)})
