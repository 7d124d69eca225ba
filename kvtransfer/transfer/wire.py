"""What crosses a transfer connection, and nothing else: frames, and the typed messages inside them.

producer                                  consumer
CHALLENGE nonce                    ->
                                   <-     OPEN nonce, proof, what is wanted
ACCEPT proof | REFUSE reason       ->
BLOCKS checksums, bytes  (many)    ->
END | REFUSE                       ->
                                   <-     RECEIVED
"""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

import xxhash

from kvtransfer.transfer.auth import NONCE_BYTES, PROOF_BYTES
from kvtransfer.transfer.errors import Reason, TransferRefused

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
class Header:
    kind: Kind
    layer: int
    first: int  # BLOCKS: index of the first block in the prompt
    count: int  # BLOCKS: number of blocks; control frames: bytes of payload
    generation: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a consumer asks for."""

    transfer_id: str
    epoch: int | None  # of the producer, as the directory knew it; None: not checked
    rank: int
    ranks: int
    layout: str  # fingerprint of the KV's shape and data type
    prompt: str  # digest of the prompt whose KV is wanted
    skip: int  # leading blocks the consumer has already
    dismiss: bool = False  # nothing is wanted: the producer may release at once

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: bytes) -> "Wanted":
        try:
            wanted = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise TransferRefused(Reason.PROTOCOL, "OPEN is not readable") from error
        sizes = (wanted.rank, wanted.ranks, wanted.skip)
        if not isinstance(wanted.transfer_id, str) or any(type(n) is not int or n < 0 for n in sizes):
            raise TransferRefused(Reason.PROTOCOL, "OPEN has fields of the wrong type")
        return wanted


def checksum(block: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


def send_control(peer: socket.socket, kind: Kind, payload: bytes = b"", generation: int = 0) -> None:
    peer.sendall(_HEADER.pack(kind, VERSION, 0, 0, len(payload), generation) + payload)


def send_refusal(peer: socket.socket, refused: TransferRefused) -> None:
    text = json.dumps({"reason": refused.reason, "detail": refused.detail[:500]})
    send_control(peer, Kind.REFUSE, text.encode())


def send_blocks(
    peer: socket.socket, layer: int, first: int, blocks: Sequence[memoryview], generation: int
) -> None:
    """Checksums are of the bytes as they are now; the bytes leave the KV cache without a copy of ours."""
    head = _HEADER.pack(Kind.BLOCKS, VERSION, layer, first, len(blocks), generation)
    sums = b"".join(_CHECKSUM.pack(checksum(block)) for block in blocks)
    _send_all(peer, [memoryview(head + sums), *blocks])


def receive_header(peer: socket.socket) -> Header:
    kind, version, layer, first, count, generation = _HEADER.unpack(receive_exactly(peer, _HEADER.size))
    if version != VERSION:
        raise TransferRefused(Reason.PROTOCOL, f"version {version}, not {VERSION}")
    try:
        return Header(Kind(kind), layer, first, count, generation)
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
        said = json.loads(payload)
        return TransferRefused(Reason(said["reason"]), str(said["detail"]))
    except (ValueError, KeyError, TypeError):
        return TransferRefused(Reason.PROTOCOL, "refused without a readable reason")


def split_open(payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Nonce, proof, and the text of `Wanted`."""
    end = NONCE_BYTES + PROOF_BYTES
    return payload[:NONCE_BYTES], payload[NONCE_BYTES:end], payload[end:]


def receive_blocks(peer: socket.socket, blocks: Sequence[memoryview]) -> None:
    """Receives into place and verifies each block."""
    sums = receive_exactly(peer, _CHECKSUM.size * len(blocks))
    _receive_all(peer, list(blocks))
    for index, (expected,) in enumerate(_CHECKSUM.iter_unpack(sums)):
        if checksum(blocks[index]) != expected:
            raise TransferRefused(Reason.CORRUPT, f"block {index} of {len(blocks)} in a frame")


def receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _receive_all(peer, [memoryview(data)])
    return bytes(data)


def _send_all(peer: socket.socket, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        at = _advance(views, at, peer.sendmsg(views[at : at + MAX_VECTORS]))


def _receive_all(peer: socket.socket, views: list[memoryview]) -> None:
    at = 0
    while at < len(views):
        if not views[at].nbytes:
            at += 1
            continue
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
