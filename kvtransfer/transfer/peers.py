"""Both ends of a transfer connection: the producer's server, and the consumer's fetch.

A producer listens on one socket a rank and serves each connection in a thread of its own. A consumer fetches
one prompt's KV into blocks already allocated for it.
"""

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from kvtransfer.errors import Reason, TransferRefused
from kvtransfer.transfer import wire
from kvtransfer.transfer.acceptor import Acceptor
from kvtransfer.transfer.exports import Exports, Reader
from kvtransfer.transfer.memory import BlockMemory

logger = logging.getLogger("conserve.kvtransfer.transfer")

HANDSHAKE_S = 10.0
MAX_CONNECTIONS = 256
GRACE_S = 5.0  # the producer gives up first, and says why


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """One rank of one engine: the two ends of a connection are compared."""

    epoch: int
    rank: int
    ranks: int
    timeout_s: float
    secret: bytes
    encrypt: bool = False  # blocks on their way


class TransferServer:
    def __init__(self, listener: socket.socket, producer: TransferEnd, exports: Exports) -> None:
        self._producer, self._exports = producer, exports
        self._acceptor = Acceptor(listener, self._serve, MAX_CONNECTIONS, "kv-transfer")

    def close(self) -> None:
        self._acceptor.close()

    def _serve(self, peer: socket.socket, address: object) -> None:
        try:
            with peer:
                peer.settimeout(HANDSHAKE_S)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._answer(wire.Channel(peer))
        except TransferRefused as refused:
            logger.warning("transfer refused to %s: %s", address, refused)
        except OSError as error:
            logger.warning("transfer to %s broke: %s", address, error)

    def _answer(self, peer: wire.Channel) -> None:
        try:
            with peer.within(HANDSHAKE_S):
                wanted = self._authenticate(peer)
            self._check(wanted)
            peer.limit(self._producer.timeout_s)
            if wanted.dismiss:
                self._exports.dismiss(wanted.transfer_id)
                peer.send_control(wire.Kind.END)
                return
            reader = self._exports.attach(
                wanted.transfer_id, wanted.prompt, wanted.skip, self._producer.timeout_s
            )
            try:
                self._stream(peer, reader)
            finally:
                self._exports.leave(reader)
        except TransferRefused as refused:
            peer.send_refusal(refused)
            raise

    def _authenticate(self, peer: wire.Channel) -> wire.Wanted:
        secret, challenge = self._producer.secret, wire.nonce()
        peer.send_control(wire.Kind.CHALLENGE, challenge)
        answer, given, text = wire.split_open(peer.receive_control(wire.Kind.OPEN))
        if not wire.proves(given, secret, wire.Signer.CONSUMER, challenge, answer, text):
            raise TransferRefused(Reason.UNAUTHORISED, "the consumer does not know this fleet's secret")
        peer.send_control(wire.Kind.ACCEPT, wire.proof(secret, wire.Signer.PRODUCER, answer, challenge))
        nonces = challenge, answer
        peer.seal(secret, wire.Signer.PRODUCER, nonces, encrypt=self._producer.encrypt)
        return wire.Wanted.decode(text)

    def _check(self, wanted: wire.Wanted) -> None:
        mine = self._producer
        if wanted.epoch is not None and wanted.epoch != mine.epoch:
            raise TransferRefused(Reason.OLD_EPOCH, f"wanted epoch {wanted.epoch}, this is {mine.epoch}")
        if (wanted.rank, wanted.ranks) != (mine.rank, mine.ranks):
            raise TransferRefused(
                Reason.MAPPING,
                f"rank {wanted.rank} of {wanted.ranks} asked rank {mine.rank} of {mine.ranks}: "
                "prefiller and decoder need the same tensor-parallel size",
            )
        if wanted.encrypt != mine.encrypt:
            raise TransferRefused(Reason.MAPPING, "the engines differ in transfer.encrypt: start them alike")
        if wanted.layout != self._exports.memory.layout:
            raise TransferRefused(
                Reason.LAYOUT, "the engines differ in model, KV data type or block size; start them alike"
            )

    def _stream(self, peer: wire.Channel, reader: Reader) -> None:
        memory, wait_s = self._exports.memory, self._producer.timeout_s
        while True:
            ready = self._exports.wait_ready(reader, wait_s)
            for layer, first, blocks in ready.runs:
                for at, piece in pieces(blocks, memory.frame_blocks(layer)):
                    with memory.outgoing(layer, piece, wait_s) as views:
                        peer.send_blocks(layer, first + at, views, ready.generation, wait_s / 2)
                    self._exports.renew(reader)
            if ready.complete and self._exports.confirm(reader, ready.generation):
                peer.send_control(wire.Kind.END, generation=ready.generation)
                peer.receive_control(wire.Kind.RECEIVED)
                return


@dataclass(frozen=True, slots=True)
class TransferSource:
    """Where a prompt's KV comes from."""

    host: str
    port: int  # of rank 0
    transfer_id: str
    epoch: int | None
    prompt: str  # digest of what the KV must be of


class Cancellation:
    """Ends a fetch from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self.cancelled = False

    def watch(self, peer: socket.socket) -> None:
        with self._lock:
            self._peer = peer
            if self.cancelled:
                raise TransferRefused(Reason.CANCELLED)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._peer is not None:
                try:
                    self._peer.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # already closed: the fetch is over


def fetch(
    source: TransferSource,
    skip: list[int],
    blocks: Sequence[list[int]],
    memory: BlockMemory,
    consumer: TransferEnd,
    cancellation: Cancellation,
) -> int:
    """Fills `blocks` with the prompt's from `skip` on, both by group; returns the bytes received."""
    with _connected(source, skip, memory.layout, consumer, cancellation) as peer:
        received = _receive(peer, skip, blocks, memory, consumer.timeout_s)
        peer.send_control(wire.Kind.RECEIVED)
        return received


def dismiss(source: TransferSource, memory: BlockMemory, consumer: TransferEnd) -> None:
    """Tells the producer that nothing of this transfer is needed."""
    with _connected(source, [], memory.layout, consumer, Cancellation(), dismiss=True) as peer:
        peer.receive_control(wire.Kind.END)


@contextmanager
def _connected(
    source: TransferSource,
    skip: list[int],
    layout: str,
    me: TransferEnd,
    cancellation: Cancellation,
    *,
    dismiss: bool = False,
) -> Iterator[wire.Channel]:
    """A connection to a producer that knows who asks, and for what."""
    address = source.host, source.port + me.rank
    which = source.transfer_id, source.epoch, me.rank, me.ranks, layout, source.prompt
    wanted = wire.Wanted(*which, skip, me.encrypt, dismiss)
    try:
        with socket.create_connection(address, timeout=me.timeout_s + GRACE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            cancellation.watch(connection)
            peer = wire.Channel(connection)
            challenge = peer.receive_control(wire.Kind.CHALLENGE)
            answer, text = wire.nonce(), msgspec.json.encode(wanted)
            mine = wire.proof(me.secret, wire.Signer.CONSUMER, challenge, answer, text)
            peer.send_control(wire.Kind.OPEN, answer + mine + text)
            given = peer.receive_control(wire.Kind.ACCEPT)
            if not wire.proves(given, me.secret, wire.Signer.PRODUCER, answer, challenge):
                raise TransferRefused(Reason.UNAUTHORISED, "the producer does not know this fleet's secret")
            peer.seal(me.secret, wire.Signer.CONSUMER, (challenge, answer), encrypt=me.encrypt)
            yield peer
    except OSError as error:
        if cancellation.cancelled:
            raise TransferRefused(Reason.CANCELLED) from error
        reason = Reason.STALLED if isinstance(error, TimeoutError) else Reason.UNREACHABLE
        raise TransferRefused(reason, f"{address[0]}:{address[1]}: {error}") from error


def pieces(blocks: list[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """With the place of each piece's first block."""
    return ((at, blocks[at : at + size]) for at in range(0, len(blocks), size))


def _receive(
    peer: wire.Channel, skip: list[int], by_group: Sequence[list[int]], memory: BlockMemory, wait_s: float
) -> int:
    received = 0
    wanted = [by_group[group] for group in memory.groups]  # by layer
    generation = -1
    arrived = [0] * len(memory.layers)
    while True:
        header, payload = peer.receive()
        if header.kind is wire.Kind.BLOCKS:
            if header.generation != generation:  # the prefill began again: what came before is void
                generation = header.generation
                arrived = [0] * len(memory.layers)
            if header.layer >= len(arrived):
                raise TransferRefused(Reason.PROTOCOL, f"no such layer: {header}")
            at, blocks = header.first - skip[memory.groups[header.layer]], wanted[header.layer]
            if at != arrived[header.layer] or at + header.count > len(blocks):
                raise TransferRefused(Reason.PROTOCOL, f"blocks out of place: {header}")
            for first, piece in pieces(blocks[at : at + header.count], memory.frame_blocks(header.layer)):
                with memory.incoming(header.layer, piece, wait_s / 2) as views:
                    peer.receive_blocks(views, payload, first, wait_s / 2)
                    received += sum(view.nbytes for view in views)
            arrived[header.layer] += header.count
        elif header.kind is wire.Kind.END:
            if header.generation != generation or arrived != (due := list(map(len, wanted))):
                raise TransferRefused(Reason.SHORT, f"layers have {arrived} of {due} blocks")
            return received
        elif header.kind is wire.Kind.REFUSE:
            raise wire.decode_refusal(payload)
        else:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} in the middle of a transfer")
