"""What crosses a transfer connection, and nothing else: frames, and the typed messages inside them.

producer                                  consumer
CHALLENGE nonce                    ->
                                   <-     OPEN nonce, proof, what is wanted
ACCEPT proof | REFUSE reason       ->
BLOCKS checksums, bytes  (many)    ->
END | REFUSE                       ->
                                   <-     RECEIVED

Both sides show that they know the fleet's secret, without sending it. The nonces are fresh, so that a
recorded answer is worth nothing; lengths are part of what is signed, so that bytes cannot move from one field
to another. What follows on the connection is not encrypted.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated

import msgspec
import xxhash

from kvtransfer.errors import Reason, TransferRefused

NONCE_BYTES = 32
PROOF_BYTES = 32


class Signer(Enum):
    """Signed too: one side's proof cannot be sent back to it as the other's."""

    CONSUMER = b"consumer"
    PRODUCER = b"producer"


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: Signer, *said: bytes) -> bytes:
    text = b"".join(len(field).to_bytes(4, "big") + field for field in (side.value, *said))
    return hmac.digest(secret, text, "sha256")


def proves(given: bytes, secret: bytes, side: Signer, *said: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *said))


VERSION = 1
MAX_CONTROL_BYTES = 4096
MAX_VECTORS = 512  # below IOV_MAX of every system
_HEADER = struct.Struct("<BBHIIQ")
_CHECKSUM = struct.Struct("<Q")


class Kind(IntEnum):
    CHALLENGE = 1
    OPEN = 2
    ACCEPT = 3
    BLOCKS = 4
    END = 5
    REFUSE = 6
    RECEIVED = 7


@dataclass(frozen=True, slots=True)
class FrameHeader:
    kind: Kind
    layer: int
    first: int  # BLOCKS: index of the first block in the prompt
    count: int  # BLOCKS: number of blocks; control frames: bytes of payload
    generation: int


Size = Annotated[int, msgspec.Meta(ge=0)]


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer asks for."""

    transfer_id: str
    epoch: int | None  # of the producer, as the directory knew it; None: not checked
    rank: Size
    ranks: Size
    layout: str  # fingerprint of the KV's shape and data type
    prompt: str  # digest of the prompt whose KV is wanted
    skip: list[Size]  # leading blocks the consumer has already or does not need, by KV cache group
    dismiss: bool = False  # nothing is wanted: the producer may release at once

    @classmethod
    def decode(cls, text: bytes) -> "Wanted":
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferRefused(Reason.PROTOCOL, f"OPEN is not readable: {error}") from error


class RefusalPayload(msgspec.Struct, frozen=True):
    """The payload of REFUSE."""

    reason: Reason
    detail: str


def checksum(block: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


def send_control(peer: socket.socket, kind: Kind, payload: bytes = b"", generation: int = 0) -> None:
    peer.sendall(_HEADER.pack(kind, VERSION, 0, 0, len(payload), generation) + payload)


def send_refusal(peer: socket.socket, refused: TransferRefused) -> None:
    send_control(peer, Kind.REFUSE, msgspec.json.encode(RefusalPayload(refused.reason, refused.detail[:500])))


def send_blocks(
    peer: socket.socket,
    layer: int,
    first: int,
    blocks: Sequence[memoryview],
    generation: int,
    limit_s: float,
) -> None:
    """Checksums are of the bytes as they are now; the bytes leave where they are without a copy of ours.

    All of it within `limit_s`: others wait for the memory.
    """
    head = _HEADER.pack(Kind.BLOCKS, VERSION, layer, first, len(blocks), generation)
    sums = b"".join(_CHECKSUM.pack(checksum(block)) for block in blocks)
    with _all_within(peer, limit_s) as until:
        _send_all(peer, [memoryview(head + sums), *blocks], until)


def receive_header(peer: socket.socket) -> FrameHeader:
    kind, version, layer, first, count, generation = _HEADER.unpack(receive_exactly(peer, _HEADER.size))
    if version != VERSION:
        raise TransferRefused(Reason.PROTOCOL, f"version {version}, not {VERSION}")
    try:
        return FrameHeader(Kind(kind), layer, first, count, generation)
    except ValueError as error:
        raise TransferRefused(Reason.PROTOCOL, f"frame of unknown kind {kind}") from error


def receive_control(peer: socket.socket, expected: Kind) -> bytes:
    """The payload of the expected frame; the sender's reason if it refuses instead."""
    header = receive_header(peer)
    if header.kind not in (expected, Kind.REFUSE) or header.count > MAX_CONTROL_BYTES:
        raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} where {expected.name} was due")
    payload = receive_exactly(peer, header.count)
    if header.kind is Kind.REFUSE:
        raise decode_refusal(payload)
    return payload


def decode_refusal(payload: bytes) -> TransferRefused:
    try:
        said = msgspec.json.decode(payload, type=RefusalPayload)
        return TransferRefused(said.reason, said.detail)
    except msgspec.MsgspecError:
        return TransferRefused(Reason.PROTOCOL, "refused without a readable reason")


def split_open(payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Nonce, proof, and the text of `Wanted`."""
    end = NONCE_BYTES + PROOF_BYTES
    return payload[:NONCE_BYTES], payload[NONCE_BYTES:end], payload[end:]


def receive_checksums(peer: socket.socket, count: int) -> list[int]:
    """Of the blocks of a frame, which follow."""
    return [one for (one,) in _CHECKSUM.iter_unpack(receive_exactly(peer, _CHECKSUM.size * count))]


def receive_blocks(
    peer: socket.socket, blocks: Sequence[memoryview], sums: Sequence[int], limit_s: float
) -> None:
    """Receives into place within `limit_s`, and verifies each block."""
    with _all_within(peer, limit_s) as until:
        _receive_all(peer, list(blocks), until)
    for index, (block, expected) in enumerate(zip(blocks, sums, strict=False)):
        if checksum(block) != expected:
            raise TransferRefused(Reason.CORRUPT, f"block {index} of {len(blocks)} in a frame")


def receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_all(peer, [memoryview(data)])
    return bytes(data)


@contextmanager
def _all_within(peer: socket.socket, limit_s: float) -> Iterator[Callable[[], None]]:
    """A socket's own limit is of each call: one that moves a byte a call would go on for ever."""
    end, usual = time.monotonic() + limit_s, peer.gettimeout()

    def until() -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a frame took more than {limit_s:g} s")
        peer.settimeout(left)

    try:
        yield until
    finally:
        peer.settimeout(usual)


def _send_all(peer: socket.socket, views: list[memoryview], before_each: Callable[[], None]) -> None:
    at = 0
    while at < len(views):
        before_each()
        at = _advance(views, at, peer.sendmsg(views[at : at + MAX_VECTORS]))


def _receive_all(
    peer: socket.socket, views: list[memoryview], before_each: Callable[[], None] = lambda: None
) -> None:
    at = 0
    while at < len(views):
        if not views[at].nbytes:
            at += 1
            continue
        before_each()
        got = peer.recvmsg_into(views[at : at + MAX_VECTORS])[0]
        if not got:
            raise ConnectionError("the peer closed the connection")
        at = _advance(views, at, got)


def _advance(views: list[memoryview], at: int, moved: int) -> int:
    while at < len(views) and moved >= views[at].nbytes:
        moved -= views[at].nbytes
        at += 1
    if moved:
        views[at] = views[at][moved:]
    return at
