"""Protocol of a transfer connection: handshake, frames, messages and keys.

`Channel` sends and receives frames within time limits; `Seal` tags and encrypts one direction. A refused
transfer raises `TransferRefused`.

producer                                  consumer
CHALLENGE nonce                    ->
                                   <-     OPEN nonce, proof, what is wanted
ACCEPT proof | REFUSE reason       ->
BLOCKS tag, bytes  (many)          ->
END | REFUSE                       ->
                                   <-     RECEIVED

Both sides prove that they know the key of transfers without sending it. Nonces are fresh, so that a recorded
answer is useless; signed fields include their lengths, so that bytes cannot move between fields. After the
handshake each direction has a key of its own (AES-GCM, with the number of the message as nonce). Each frame
has a tag, and its blocks have another, so that nothing can be changed, left out, repeated or reordered.
Blocks are also encrypted if both ends are configured to.
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
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtransfer import KVTransferError
from kvtransfer.metrics import Reason

NONCE_BYTES = 32
PROOF_BYTES = 32


class TransferRefused(KVTransferError):
    """The transfer will not happen. The reason is sent to the other side."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Signer(Enum):
    """Side of a connection that signs a proof. The proof names the side, and so cannot be sent back to it."""

    CONSUMER = b"consumer"
    PRODUCER = b"producer"


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: Signer, *fields: bytes) -> bytes:
    text = b"".join(len(field).to_bytes(4, "big") + field for field in (side.value, *fields))
    return hmac.digest(secret, text, "sha256")


def proves(given: bytes, secret: bytes, side: Signer, *fields: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, *fields))


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
    """Payload of OPEN: the part of a prompt's KV that a consumer asks for."""

    transfer_id: str
    epoch: int | None  # producer's epoch as the directory knew it; None: not checked
    rank: Size
    ranks: Size
    layout: str  # fingerprint of the KV's shape and data type
    prompt: str  # digest of the prompt whose KV is wanted
    skip: list[Size]  # leading blocks the consumer has already or does not need, by KV cache group
    layers: list[Size]  # sent over this connection
    lanes: Size = 1  # number of connections for all layers
    piece_bytes: Size = 0  # most bytes of blocks in a frame, but at least a block
    encrypt: bool = False  # encrypt the blocks; the same at both ends
    dismiss: bool = False  # the producer may release the export without sending it

    @classmethod
    def decode(cls, text: bytes) -> "Wanted":
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferRefused(Reason.PROTOCOL, f"OPEN is not readable: {error}") from error


class RefusalPayload(msgspec.Struct, frozen=True):
    """Payload of REFUSE frames."""

    reason: Reason
    detail: str


class Seal:
    """Tags and ciphers of one direction of a connection.

    Both ends count the frames. Within a frame, tag number 0 covers the frame and number 1 its blocks.
    """

    def __init__(self, secret: bytes, side: Signer, *nonces: bytes, encrypt: bool) -> None:
        """Derive the key of one direction from the secret. With `encrypt`, blocks are encrypted, too."""
        key = proof(secret, side, b"seal", *nonces)[:KEY_BYTES]
        self._cipher, self._aes, self._encrypt = AESGCM(key), algorithms.AES(key), encrypt
        self._frames, self._buffer = 0, bytearray()

    def begin(self) -> None:
        self._frames += 1

    def tag(self, frame: bytes) -> bytes:
        return self._cipher.encrypt(self._nonce(0), b"", frame)

    def check(self, frame: bytes, tag: bytes) -> None:
        try:
            self._cipher.decrypt(self._nonce(0), tag, frame)
        except InvalidTag:
            raise _changed() from None

    # The next two methods handle many bytes. They release Python's lock, which `AESGCM` keeps while it reads
    # signed data.

    def seal_blocks(self, views: Sequence[memoryview]) -> tuple[bytes, Sequence[memoryview]]:
        """Return one tag over all views in order, and what to send: the views, or their encrypted bytes.

        Encrypted bytes are valid until the next call.
        """
        cipher = Cipher(self._aes, modes.GCM(self._nonce(1))).encryptor()
        if self._encrypt:
            size, at = sum(view.nbytes for view in views), 0
            if len(self._buffer) < size:
                self._buffer = bytearray(size)
            into = memoryview(self._buffer)[:size]
            for view in views:
                at += cipher.update_into(view, into[at : at + view.nbytes])
            views = [into]
        else:
            for view in views:
                cipher.authenticate_additional_data(view)
        cipher.finalize()
        return cipher.tag, views

    def open_blocks(self, views: Sequence[memoryview], tag: bytes) -> None:
        """Check the tag of received blocks, which are decrypted in place."""
        cipher = Cipher(self._aes, modes.GCM(self._nonce(1), tag)).decryptor()
        for view in views:
            if self._encrypt:
                cipher.update_into(view, view)
            else:
                cipher.authenticate_additional_data(view)
        try:
            cipher.finalize()
        except InvalidTag:
            raise _changed() from None

    def _nonce(self, number: int) -> bytes:
        return _NONCE.pack(self._frames, number)


def _changed() -> TransferRefused:
    return TransferRefused(Reason.CORRUPT, "the received bytes differ from the sent bytes")


class Channel:
    """Connection to a peer: a handshake, then authenticated frames, whose blocks may be encrypted."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._seals: tuple[Seal, ...] | None = None  # ours and the peer's
        self._until: Callable[[], None] = lambda: None

    def seal(self, secret: bytes, we: Signer, nonces: tuple[bytes, bytes], *, encrypt: bool) -> None:
        they = Signer.PRODUCER if we is Signer.CONSUMER else Signer.CONSUMER
        self._seals = tuple(Seal(secret, side, *nonces, encrypt=encrypt) for side in (we, they))

    def ask(self, secret: bytes, wanted: bytes, *purpose: bytes) -> tuple[bytes, bytes]:
        """Do the consumer's part of the handshake; return both nonces. `purpose` is part of the proofs."""
        challenge, answer = self.receive_control(Kind.CHALLENGE), nonce()
        mine = proof(secret, Signer.CONSUMER, *purpose, challenge, answer, wanted)
        self.send_control(Kind.OPEN, answer + mine + wanted)
        given = self.receive_control(Kind.ACCEPT)
        if not proves(given, secret, Signer.PRODUCER, *purpose, answer, challenge):
            raise TransferRefused(Reason.UNAUTHORISED, "the producer does not know this fleet's secret")
        return challenge, answer

    def answer(
        self, secret: bytes, *purpose: bytes, check: Callable[[bytes], object] = lambda wanted: None
    ) -> tuple[bytes, tuple[bytes, bytes]]:
        """Do the producer's part of the handshake; return the consumer's request, and both nonces.

        If `check` raises for the request, the connection is not accepted.
        """
        challenge = nonce()
        self.send_control(Kind.CHALLENGE, challenge)
        payload, end = self.receive_control(Kind.OPEN), NONCE_BYTES + PROOF_BYTES
        answer, given, wanted = payload[:NONCE_BYTES], payload[NONCE_BYTES:end], payload[end:]
        if not proves(given, secret, Signer.CONSUMER, *purpose, challenge, answer, wanted):
            raise TransferRefused(Reason.UNAUTHORISED, "the consumer does not know this fleet's secret")
        check(wanted)
        self.send_control(Kind.ACCEPT, proof(secret, Signer.PRODUCER, *purpose, answer, challenge))
        return wanted, (challenge, answer)

    def limit(self, seconds: float) -> None:
        """Set the longest time that the peer may be silent."""
        self._peer.settimeout(seconds)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Limit the total time of all control frames in this context."""
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
        refusal = RefusalPayload(refused.reason, refused.detail[:500])
        self.send_control(Kind.REFUSE, msgspec.json.encode(refusal))

    def send_blocks(
        self, layer: int, first: int, count: int, views: Sequence[memoryview], generation: int, limit_s: float
    ) -> None:
        """Send a frame of blocks with a tag of their current bytes, which are copied only to encrypt them.

        Raises TimeoutError after `limit_s`, because other threads wait for the memory.
        """
        assert self._seals is not None
        seal = self._seals[0]
        seal.begin()
        tag, views = seal.seal_blocks(views)
        head = _HEADER.pack(Kind.BLOCKS, VERSION, layer, first, count, generation) + tag
        with all_within(self._peer, limit_s) as until:
            send_all(self._peer, [memoryview(head + seal.tag(head)), *views], until)

    def receive(self) -> tuple[FrameHeader, bytes]:
        """Receive a frame; return its header, and its payload or the tag of the blocks that follow."""
        start = receive_exactly(self._peer, _HEADER.size, self._until)
        kind, version, layer, first, count, generation = _HEADER.unpack(start)
        if version != VERSION:
            raise TransferRefused(Reason.PROTOCOL, f"protocol version {version}, not {VERSION}")
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
        """Receive the payload of an expected frame. If the peer refuses instead, raise its refusal."""
        header, payload = self.receive()
        if header.kind is Kind.REFUSE:
            raise decode_refusal(payload)
        if header.kind is not expected:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} where {expected.name} was due")
        return payload

    def receive_blocks(self, views: Sequence[memoryview], tag: bytes, limit_s: float) -> None:
        """Receive the blocks of a frame in place within `limit_s`, and check their tag."""
        assert self._seals is not None
        seal = self._seals[1]
        with all_within(self._peer, limit_s) as until:
            receive_all(self._peer, list(views), until)
        seal.open_blocks(views, tag)


def decode_refusal(payload: bytes) -> TransferRefused:
    try:
        refusal = msgspec.json.decode(payload, type=RefusalPayload)
        return TransferRefused(refusal.reason, refusal.detail)
    except msgspec.MsgspecError:
        return TransferRefused(Reason.PROTOCOL, "refused without a readable reason")


def receive_exactly(peer: socket.socket, size: int, before_each: Callable[[], None] = lambda: None) -> bytes:
    data = bytearray(size)
    receive_all(peer, [memoryview(data)], before_each)
    return bytes(data)


@contextmanager
def all_within(peer: socket.socket, limit_s: float) -> Iterator[Callable[[], None]]:
    """Limit the total time of all socket calls in this context.

    A socket's own time-out limits each call only, so a peer could send a byte at a time for ever. The limit
    is set in the kernel and not in Python, so that one call sends or receives everything that it was given.
    """
    end, usual = time.monotonic() + limit_s, peer.gettimeout()

    def until() -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a frame took more than {limit_s:g} s")
        _limit_calls(peer, max(left, 0.001))

    try:
        until()
        peer.settimeout(None)
        yield until
    except BlockingIOError as error:
        raise TimeoutError(f"a frame took more than {limit_s:g} s") from error
    finally:
        if peer.fileno() >= 0:
            _limit_calls(peer, 0.0)  # no limit any more
            peer.settimeout(usual)


def _limit_calls(peer: socket.socket, seconds: float) -> None:
    limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, way, limit)


def send_all(peer: socket.socket, views: list[memoryview], before_each: Callable[[], None]) -> None:
    """Send views with as few calls as possible, because each call gives other threads the GIL."""
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
