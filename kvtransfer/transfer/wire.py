"""A transfer connection: its handshake, its frames, the typed messages in them, and the keys they are under.

`Channel` sends and receives frames, each within a time; `Seal` tags and encrypts one direction of it. A
transfer that will not happen is `TransferRefused`.

producer                                  consumer
CHALLENGE nonce                    ->
                                   <-     OPEN nonce, proof, what is wanted
ACCEPT proof | REFUSE reason       ->
BLOCKS tag, bytes  (many)          ->
END | REFUSE                       ->
                                   <-     RECEIVED

Both sides show that they know the key of transfers, without sending it. The nonces are fresh, so that a
recorded answer is worth nothing; lengths are part of what is signed, so that bytes cannot move from one field
to another. What follows is under keys of this one connection, one for each direction (AES-GCM, whose count of
messages is the nonce): each frame has a tag, and so have its blocks together, so that nothing on the way can
be changed, left out, repeated or moved. Blocks are encrypted too where both ends are told to.
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
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtransfer import KVTransferError
from kvtransfer.metrics import Reason

NONCE_BYTES = 32
PROOF_BYTES = 32


class TransferRefused(KVTransferError):
    """A transfer that will not happen, with the reason the other side is told."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


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


VERSION = 3
KEY_BYTES = 16
TAG_BYTES = 16
MAX_PAYLOAD_BYTES = 4096
MAX_VECTORS = 512  # below IOV_MAX of every system
_HEADER = struct.Struct("<BBHIIQ")
_NONCE = struct.Struct(">QI")
_TIMEVAL = struct.Struct("ll")


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
    count: int  # BLOCKS: number of blocks; other frames: bytes of payload
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
    layers: list[Size]  # that come over this connection
    lanes: Size = 1  # connections over which all layers come
    piece_bytes: Size = 0  # most of blocks that the consumer takes in a frame, if that is a block or more
    encrypt: bool = False  # the blocks; both ends are told alike
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


class Seal:
    """One direction of a connection. Both ends count its frames; in a frame, the tag of all of it is number
    0, and those of its blocks follow."""

    def __init__(self, secret: bytes, side: Signer, *nonces: bytes) -> None:
        key = proof(secret, side, b"seal", *nonces)[:KEY_BYTES]
        self._cipher, self._aes = AESGCM(key), algorithms.AES(key)
        self._frames = 0

    def begin(self) -> None:
        self._frames += 1

    def tag(self, said: bytes | memoryview, number: int = 0) -> bytes:
        return self._cipher.encrypt(self._nonce(number), b"", said)

    def check(self, said: bytes | memoryview, tag: bytes, number: int = 0) -> None:
        try:
            self._cipher.decrypt(self._nonce(number), tag, said)
        except InvalidTag:
            raise _changed() from None

    def encrypt(self, block: memoryview, number: int) -> memoryview:
        """With its tag behind it."""
        return memoryview(self._cipher.encrypt(self._nonce(number), block, None))

    def decrypt(self, sealed: bytearray, number: int, into: memoryview) -> None:
        try:
            self._cipher.decrypt_into(self._nonce(number), sealed, None, into)
        except InvalidTag:
            raise _changed() from None

    # Of many bytes: without Python's lock, which `AESGCM` keeps while it reads what is only signed.

    def tag_all(self, views: Sequence[memoryview], number: int) -> bytes:
        """One, of all these one after the other."""
        cipher = Cipher(self._aes, modes.GCM(self._nonce(number))).encryptor()
        for view in views:
            cipher.authenticate_additional_data(view)
        cipher.finalize()
        return cipher.tag

    def check_all(self, views: Sequence[memoryview], tag: bytes, number: int) -> None:
        cipher = Cipher(self._aes, modes.GCM(self._nonce(number), tag)).decryptor()
        for view in views:
            cipher.authenticate_additional_data(view)
        _finish(cipher)

    def encrypt_all(self, views: Sequence[memoryview], into: memoryview, number: int) -> bytes:
        """Their tag."""
        cipher = Cipher(self._aes, modes.GCM(self._nonce(number))).encryptor()
        at = 0
        for view in views:
            at += cipher.update_into(view, into[at : at + view.nbytes])
        cipher.finalize()
        return cipher.tag

    def decrypt_all(self, views: Sequence[memoryview], tag: bytes, number: int) -> None:
        """In place."""
        cipher = Cipher(self._aes, modes.GCM(self._nonce(number), tag)).decryptor()
        for view in views:
            cipher.update_into(view, view)
        _finish(cipher)

    def _nonce(self, number: int) -> bytes:
        return _NONCE.pack(self._frames, number)


def _finish(cipher: AEADDecryptionContext) -> None:
    try:
        cipher.finalize()
    except InvalidTag:
        raise _changed() from None


def _changed() -> TransferRefused:
    return TransferRefused(Reason.CORRUPT, "what came is not what was sent")


class Channel:
    """A connection and what seals it, from the handshake's end on."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._seals: tuple[Seal, Seal] | None = None  # ours, and theirs
        self._encrypt = False
        self._sealed = bytearray()  # a piece as it leaves, where it is encrypted
        self._until: Callable[[], None] = lambda: None

    def seal(self, secret: bytes, we: Signer, nonces: tuple[bytes, bytes], *, encrypt: bool) -> None:
        they = Signer.PRODUCER if we is Signer.CONSUMER else Signer.CONSUMER
        self._seals = Seal(secret, we, *nonces), Seal(secret, they, *nonces)
        self._encrypt = encrypt

    def limit(self, seconds: float) -> None:
        """Longest silence from now on."""
        self._peer.settimeout(seconds)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All control frames from now on together, not each."""
        with all_within(self._peer, seconds) as self._until:
            yield
        self._until = lambda: None

    def send_control(self, kind: Kind, payload: bytes = b"", generation: int = 0) -> None:
        frame = _HEADER.pack(kind, VERSION, 0, 0, len(payload), generation) + payload
        if self._seals is not None:
            self._seals[0].begin()
            frame += self._seals[0].tag(frame)
        self._peer.sendall(frame)

    def send_refusal(self, refused: TransferRefused) -> None:
        said = RefusalPayload(refused.reason, refused.detail[:500])
        self.send_control(Kind.REFUSE, msgspec.json.encode(said))

    def send_blocks(
        self, layer: int, first: int, count: int, views: Sequence[memoryview], generation: int, limit_s: float
    ) -> None:
        """So many blocks. Their tag is of the bytes as they are now; unless they are encrypted, they leave
        where they are without a copy of ours.

        All of it within `limit_s`: others wait for the memory.
        """
        assert self._seals is not None
        seal = self._seals[0]
        seal.begin()
        if self._encrypt:
            size = sum(view.nbytes for view in views)
            if len(self._sealed) < size:
                self._sealed = bytearray(size)
            sealed = memoryview(self._sealed)[:size]
            tag, views = seal.encrypt_all(views, sealed, 1), [sealed]
        else:
            tag = seal.tag_all(views, 1)
        head = _HEADER.pack(Kind.BLOCKS, VERSION, layer, first, count, generation) + tag
        with all_within(self._peer, limit_s) as until:
            send_all(self._peer, [memoryview(head + seal.tag(head)), *views], until)

    def receive(self) -> tuple[FrameHeader, bytes]:
        """The next frame with its payload: of BLOCKS the tag of those that follow."""
        start = receive_exactly(self._peer, _HEADER.size, self._until)
        kind, version, layer, first, count, generation = _HEADER.unpack(start)
        if version != VERSION:
            raise TransferRefused(Reason.PROTOCOL, f"version {version}, not {VERSION}")
        try:
            header = FrameHeader(Kind(kind), layer, first, count, generation)
        except ValueError as error:
            raise TransferRefused(Reason.PROTOCOL, f"frame of unknown kind {kind}") from error
        size = TAG_BYTES if header.kind is Kind.BLOCKS else count
        if size > MAX_PAYLOAD_BYTES:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} with {size} bytes")
        payload = receive_exactly(self._peer, size, self._until)
        if self._seals is not None:
            self._seals[1].begin()
            self._seals[1].check(start + payload, receive_exactly(self._peer, TAG_BYTES, self._until))
        return header, payload

    def receive_control(self, expected: Kind) -> bytes:
        """The payload of the expected frame; the sender's reason if it refuses instead."""
        header, payload = self.receive()
        if header.kind is Kind.REFUSE:
            raise decode_refusal(payload)
        if header.kind is not expected:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} where {expected.name} was due")
        return payload

    def receive_blocks(self, views: Sequence[memoryview], tag: bytes, limit_s: float) -> None:
        """All of a frame into place, within `limit_s`. What is not as it was sent raises."""
        assert self._seals is not None
        seal = self._seals[1]
        with all_within(self._peer, limit_s) as until:
            receive_all(self._peer, list(views), until)
        if self._encrypt:
            seal.decrypt_all(views, tag, 1)
        else:
            seal.check_all(views, tag, 1)


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


def receive_exactly(peer: socket.socket, size: int, before_each: Callable[[], None] = lambda: None) -> bytes:
    data = bytearray(size)
    receive_all(peer, [memoryview(data)], before_each)
    return bytes(data)


@contextmanager
def all_within(peer: socket.socket, limit_s: float) -> Iterator[Callable[[], None]]:
    """A socket's own limit is of each call: one that moves a byte a call would go on for ever.

    The system keeps the limit, not Python: a call then moves all it was given, not what a buffer holds.
    """
    end, usual = time.monotonic() + limit_s, peer.gettimeout()

    def until() -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it took more than {limit_s:g} s")
        _limit_calls(peer, max(left, 0.001))

    try:
        until()
        peer.settimeout(None)
        yield until
    except BlockingIOError as error:
        raise TimeoutError(f"it took more than {limit_s:g} s") from error
    finally:
        if peer.fileno() >= 0:
            _limit_calls(peer, 0.0)  # none: what waits for ever afterwards would have the last one
            peer.settimeout(usual)


def _limit_calls(peer: socket.socket, seconds: float) -> None:
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, way, limit)


def send_all(peer: socket.socket, views: list[memoryview], before_each: Callable[[], None]) -> None:
    """In as few calls as may be: each lets other threads have the interpreter."""
    at = 0
    while at < len(views):
        before_each()
        at = _advance(views, at, peer.sendmsg(views[at : at + MAX_VECTORS]))


def receive_all(
    peer: socket.socket, views: list[memoryview], before_each: Callable[[], None] = lambda: None
) -> None:
    at = 0
    while at < len(views):
        if not views[at].nbytes:
            at += 1
            continue
        before_each()
        got = peer.recvmsg_into(views[at : at + MAX_VECTORS], 0, socket.MSG_WAITALL)[0]
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
