"""The consumer's end: fetch one prompt's KV into blocks already allocated for it."""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.errors import Reason, TransferRefused
from kvtransfer.transfer import wire
from kvtransfer.transfer.memory import BlockMemory

GRACE_S = 5.0  # the producer gives up first, and says why


@dataclass(frozen=True, slots=True)
class TransferSource:
    """Where a prompt's KV comes from."""

    host: str
    port: int  # of rank 0
    transfer_id: str
    epoch: int | None
    prompt: str  # digest of what the KV must be of


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who fetches."""

    rank: int
    ranks: int
    timeout_s: float
    secret: bytes


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
    skip: int,
    blocks: list[int],
    memory: BlockMemory,
    consumer: Consumer,
    cancellation: Cancellation,
) -> int:
    """Fills `blocks` with the prompt's blocks from `skip` on; returns the bytes received."""

    def transfer(peer: socket.socket) -> int:
        cancellation.watch(peer)
        _open(peer, source, skip, memory.layout, consumer, dismiss=False)
        received = _receive(peer, skip, blocks, memory)
        wire.send_control(peer, wire.Kind.RECEIVED)
        return received

    return _with_connection(source, consumer, cancellation, transfer)


def dismiss(source: TransferSource, memory: BlockMemory, consumer: Consumer) -> None:
    """Tells the producer that nothing of this transfer is needed."""

    def tell(peer: socket.socket) -> int:
        _open(peer, source, 0, memory.layout, consumer, dismiss=True)
        wire.receive_control(peer, wire.Kind.END)
        return 0

    _with_connection(source, consumer, Cancellation(), tell)


def _with_connection(
    source: TransferSource,
    consumer: Consumer,
    cancellation: Cancellation,
    talk: Callable[[socket.socket], int],
) -> int:
    address = source.host, source.port + consumer.rank
    try:
        with socket.create_connection(address, timeout=consumer.timeout_s + GRACE_S) as peer:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return talk(peer)
    except OSError as error:
        if cancellation.cancelled:
            raise TransferRefused(Reason.CANCELLED) from error
        reason = Reason.STALLED if isinstance(error, TimeoutError) else Reason.UNREACHABLE
        raise TransferRefused(reason, f"{address[0]}:{address[1]}: {error}") from error


def _open(
    peer: socket.socket, source: TransferSource, skip: int, layout: str, consumer: Consumer, *, dismiss: bool
) -> None:
    wanted = wire.Wanted(
        source.transfer_id,
        source.epoch,
        consumer.rank,
        consumer.ranks,
        layout,
        source.prompt,
        skip,
        dismiss,
    )
    challenge = wire.receive_control(peer, wire.Kind.CHALLENGE)
    answer, text = wire.nonce(), wanted.encode()
    mine = wire.proof(consumer.secret, wire.Signer.CONSUMER, challenge, answer, text)
    wire.send_control(peer, wire.Kind.OPEN, answer + mine + text)
    given = wire.receive_control(peer, wire.Kind.ACCEPT)
    if not wire.proves(given, consumer.secret, wire.Signer.PRODUCER, answer, challenge):
        raise TransferRefused(Reason.UNAUTHORISED, "the producer does not know this fleet's secret")


def _receive(peer: socket.socket, skip: int, blocks: list[int], memory: BlockMemory) -> int:
    received = 0
    generation = -1
    arrived = [0] * len(memory.layers)
    while True:
        header = wire.receive_header(peer)
        if header.kind is wire.Kind.BLOCKS:
            if header.generation != generation:  # the prefill began again: what came before is void
                generation = header.generation
                arrived = [0] * len(memory.layers)
            at = header.first - skip
            if header.layer >= len(arrived) or at != arrived[header.layer] or at + header.count > len(blocks):
                raise TransferRefused(Reason.PROTOCOL, f"blocks out of place: {header}")
            views = [memory.view(header.layer, block) for block in blocks[at : at + header.count]]
            wire.receive_blocks(peer, views)
            arrived[header.layer] += header.count
            received += sum(view.nbytes for view in views)
        elif header.kind is wire.Kind.END:
            if header.generation != generation or any(n != len(blocks) for n in arrived):
                raise TransferRefused(Reason.SHORT, f"layers have {arrived} of {len(blocks)} blocks")
            return received
        elif header.kind is wire.Kind.REFUSE:
            raise wire.decode_refusal(wire.receive_exactly(peer, min(header.count, wire.MAX_CONTROL_BYTES)))
        else:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} in the middle of a transfer")
