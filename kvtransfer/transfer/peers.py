"""Both ends of a transfer: the producer's server, and the consumer's fetch.

A producer listens on one socket for each rank and serves each connection in a thread. A consumer fetches a
prompt's KV into allocated blocks over one connection or several, each with a part of the layers, because one
connection is not faster than the thread that gathers, tags and sends its bytes. The connections of one fetch
(*lanes* in the code) share only the export: each has a handshake, keys, frames and an END of its own.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from kvtransfer.metrics import Reason
from kvtransfer.transfer import wire
from kvtransfer.transfer.exports import Exports, Reader
from kvtransfer.transfer.kv_memory import BlockMemory
from kvtransfer.transfer.wire import TransferRefused

logger = logging.getLogger("conserve.kvtransfer.transfer")

LANES = 4  # most connections for one prompt
LANE_BYTES = 32 << 20  # least bytes of a connection: a handshake and a thread cost as much as a few MiB
MAX_CONNECTIONS = 256 * LANES
ACCEPT_AGAIN_S = 0.1
HANDSHAKE_S = 10.0
GRACE_S = 5.0  # a consumer waits this much longer than the producer, which gives up first and says why


class Acceptor:
    """Accepts connections and serves each in a thread, at most `most` at a time.

    It accepts until it is closed, even if the system runs out of file descriptors or threads.
    """

    def __init__(
        self, listener: socket.socket, serve: Callable[[socket.socket, object], None], most: int, name: str
    ) -> None:
        """Start to accept connections. `serve` gets a connection with its address, and closes it."""
        self._listener, self._serve, self._name = listener, serve, name
        self._slots = threading.BoundedSemaphore(most)
        self._closed = False
        threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # `close` alone does not end a waiting `accept`
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                peer, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                self._not_accepted(error)  # for example, no file descriptor is left
                continue
            try:
                threading.Thread(
                    target=self._served, args=(peer, address), name=self._name, daemon=True
                ).start()
            except RuntimeError as error:  # no thread can be started
                peer.close()
                self._not_accepted(error)

    def _not_accepted(self, error: Exception) -> None:
        self._slots.release()
        logger.warning("%s: a connection could not be accepted: %s", self._name, error)
        time.sleep(ACCEPT_AGAIN_S)

    def _served(self, peer: socket.socket, address: object) -> None:
        try:
            self._serve(peer, address)
        finally:
            self._slots.release()


def layers_by_lane(layer_bytes: Sequence[int]) -> list[list[int]]:
    """Assign each layer to the connection that has the fewest bytes.

    Every connection gets some of the largest layers, which progress with every chunk of the prompt. A
    connection with only smaller layers (windows, states) would be silent until the end.
    """
    most = max(layer_bytes, default=0)
    full = [layer for layer, size in enumerate(layer_bytes) if size == most]
    others = [layer for layer, size in enumerate(layer_bytes) if size < most]
    lanes = max(1, min(LANES, len(full), sum(layer_bytes) // LANE_BYTES))
    shares: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for layer in (*full, *others):
        least = loads.index(min(loads))
        shares[least].append(layer)
        loads[least] += layer_bytes[layer]
    return [sorted(share) for share in shares]


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """One rank of an engine, as one end of a connection."""

    epoch: int
    rank: int
    ranks: int
    timeout_s: float
    secret: bytes
    encrypt: bool = False  # whether blocks are encrypted


class TransferServer:
    """Server of one producer rank: sends exports to the consumers that ask for them."""

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
                text, nonces = peer.answer(self._producer.secret)
                encrypt = self._producer.encrypt
                peer.seal(self._producer.secret, wire.Signer.PRODUCER, nonces, encrypt=encrypt)
                wanted = wire.Wanted.decode(text)
            self._check(wanted)
            peer.limit(self._producer.timeout_s)
            if wanted.dismiss:
                self._exports.dismiss(wanted.transfer_id)
                peer.send_control(wire.Kind.END)
                return
            which = wanted.transfer_id, wanted.prompt, wanted.skip, self._producer.timeout_s
            reader = self._exports.attach(*which, wanted.layers, wanted.lanes)
            try:
                self._stream(peer, reader, min(wanted.piece_bytes, self._exports.memory.piece_bytes))
            except BaseException:
                self._exports.leave(reader)
                raise
            self._exports.delivered(reader)
        except TransferRefused as refused:
            peer.send_refusal(refused)
            raise

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

    def _stream(self, peer: wire.Channel, reader: Reader, piece_bytes: int) -> None:
        memory, wait_s = self._exports.memory, self._producer.timeout_s
        while True:
            ready = self._exports.wait_ready(reader, wait_s)
            for layer, first, blocks in ready.runs:
                for at, piece in pieces(blocks, memory.piece_blocks(layer, piece_bytes)):
                    with memory.outgoing(layer, piece, wait_s) as views:
                        where = layer, first + at, len(piece)
                        peer.send_blocks(*where, views, ready.generation, wait_s / 2)
                    self._exports.renew(reader)
            if ready.complete and self._exports.confirm(reader, ready.generation):
                peer.send_control(wire.Kind.END, generation=ready.generation)
                peer.receive_control(wire.Kind.RECEIVED)
                return


@dataclass(frozen=True, slots=True)
class TransferSource:
    """Producer of a prompt's KV, and the transfer to request from it."""

    host: str
    port: int  # port of rank 0
    transfer_id: str
    epoch: int | None
    prompt: str  # digest of the prompt


class Cancellation:
    """Handle that ends a fetch on all its connections from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []
        self.cancelled = False

    def watch(self, peer: socket.socket) -> None:
        with self._lock:
            self._peers.append(peer)
            if self.cancelled:
                raise TransferRefused(Reason.CANCELLED)

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            for peer in self._peers:
                with suppress(OSError):  # the connection has ended
                    peer.shutdown(socket.SHUT_RDWR)


def fetch(
    source: TransferSource,
    skip: list[int],
    blocks: Sequence[list[int]],
    memory: BlockMemory,
    consumer: TransferEnd,
    cancellation: Cancellation,
) -> int:
    """Fetch a prompt's KV into `blocks`, and return the number of bytes received.

    `skip` has the number of leading blocks that are not fetched. `skip` and `blocks` have one entry for each
    KV cache group. The first connection that fails ends the others, and its exception is raised.
    """
    due = [
        len(blocks[group]) * memory.block_bytes(layer) if blocks[group] else 0
        for layer, group in enumerate(memory.groups)
    ]
    shares = layers_by_lane(due)
    failures: list[BaseException] = []
    generations: set[int] = set()

    def lane(layers: list[int]) -> int:
        try:
            with _connected(source, skip, memory, consumer, cancellation, layers, len(shares)) as peer:
                received, generation = _receive(peer, skip, blocks, memory, layers, consumer.timeout_s)
                generations.add(generation)
                if len(generations) > 1:
                    raise TransferRefused(Reason.SHORT, "a connection ended before the prefill began again")
                peer.send_control(wire.Kind.RECEIVED)
                return received
        except BaseException as failure:
            failures.append(failure)
            cancellation.cancel()
            raise

    if len(shares) == 1:
        return lane(shares[0])
    with ThreadPoolExecutor(len(shares), thread_name_prefix="kv-lane") as threads:
        lanes = [threads.submit(lane, layers) for layers in shares]
    if failures:
        raise failures[0]
    return sum(ended.result() for ended in lanes)


def dismiss(source: TransferSource, memory: BlockMemory, consumer: TransferEnd) -> None:
    """Tell the producer that it may release an export, because the consumer does not need it."""
    with _connected(source, [], memory, consumer, Cancellation(), [], 1, dismiss=True) as peer:
        peer.receive_control(wire.Kind.END)


@contextmanager
def _connected(
    source: TransferSource,
    skip: list[int],
    memory: BlockMemory,
    me: TransferEnd,
    cancellation: Cancellation,
    layers: list[int],
    lanes: int,
    *,
    dismiss: bool = False,
) -> Iterator[wire.Channel]:
    """Connect to a producer, complete the handshake, and yield the channel."""
    address = source.host, source.port + me.rank
    which = source.transfer_id, source.epoch, me.rank, me.ranks, memory.layout, source.prompt
    wanted = wire.Wanted(*which, skip, layers, lanes, memory.piece_bytes, me.encrypt, dismiss)
    try:
        with socket.create_connection(address, timeout=me.timeout_s + GRACE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            cancellation.watch(connection)
            peer = wire.Channel(connection)
            nonces = peer.ask(me.secret, msgspec.json.encode(wanted))
            peer.seal(me.secret, wire.Signer.CONSUMER, nonces, encrypt=me.encrypt)
            yield peer
    except OSError as error:
        if cancellation.cancelled:
            raise TransferRefused(Reason.CANCELLED) from error
        reason = Reason.STALLED if isinstance(error, TimeoutError) else Reason.UNREACHABLE
        raise TransferRefused(reason, f"{address[0]}:{address[1]}: {error}") from error


def pieces(blocks: list[int], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield pieces of at most `size` blocks, each with the index of its first block."""
    return ((at, blocks[at : at + size]) for at in range(0, len(blocks), size))


def _receive(
    peer: wire.Channel,
    skip: list[int],
    by_group: Sequence[list[int]],
    memory: BlockMemory,
    layers: list[int],
    wait_s: float,
) -> tuple[int, int]:
    """Receive the blocks of one connection; return the number of bytes, and the generation of the blocks."""
    received = 0
    wanted = {layer: by_group[memory.groups[layer]] for layer in layers}
    generation = -1
    arrived = dict.fromkeys(layers, 0)
    while True:
        header, payload = peer.receive()
        if header.kind is wire.Kind.BLOCKS:
            layer = header.layer
            if header.generation != generation:  # the prefill began again: what came before is void
                generation = header.generation
                arrived = dict.fromkeys(layers, 0)
            if layer not in arrived:
                raise TransferRefused(Reason.PROTOCOL, f"not a layer of this connection: {header}")
            at, blocks = header.first - skip[memory.groups[layer]], wanted[layer]
            if at != arrived[layer] or not 0 < header.count <= len(blocks) - at:
                raise TransferRefused(Reason.PROTOCOL, f"blocks out of place: {header}")
            if header.count > memory.piece_blocks(layer, memory.piece_bytes):
                raise TransferRefused(Reason.PROTOCOL, f"more blocks than asked for at once: {header}")
            piece = blocks[at : at + header.count]
            with memory.incoming(layer, piece, wait_s / 2) as views:
                peer.receive_blocks(views, payload, wait_s / 2)
                received += sum(view.nbytes for view in views)
            arrived[layer] += header.count
        elif header.kind is wire.Kind.END:
            due = {layer: len(blocks) for layer, blocks in wanted.items()}
            if arrived != due or header.generation != generation:
                raise TransferRefused(Reason.SHORT, f"layers have {arrived} of {due} blocks")
            return received, generation
        elif header.kind is wire.Kind.REFUSE:
            raise wire.decode_refusal(payload)
        else:
            raise TransferRefused(Reason.PROTOCOL, f"{header.kind.name} in the middle of a transfer")
