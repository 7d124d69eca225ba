"""Over real sockets, received KV equals the computed KV or the transfer is refused."""

import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from kvtransfer.metrics import Reason
from kvtransfer.transfer import wire
from kvtransfer.transfer.exports import Export, Exports, Written
from kvtransfer.transfer.kv_memory import BlockMemory
from kvtransfer.transfer.peers import (
    Cancellation,
    TransferEnd,
    TransferServer,
    TransferSource,
    dismiss,
    fetch,
)
from kvtransfer.transfer.wire import TransferRefused

LAYERS, BLOCK_TOKENS, BLOCK_BYTES, BLOCKS = 3, 16, 4096, 64
SECRET = b"a secret for these tests"
PROMPT = list(range(10, 40))  # blocks of the prompt on the producer
TOKENS = len(PROMPT) * BLOCK_TOKENS - 5
CONSUMER = TransferEnd(1, 0, 1, 10.0, SECRET)


class Memory(BlockMemory):
    def __init__(self, fill: bool) -> None:
        self.layers = tuple(f"layer{n}" for n in range(LAYERS))
        self.groups = (0,) * LAYERS
        self.layout = "same"
        size = BLOCK_BYTES * BLOCKS
        self.data = [bytearray(secrets.token_bytes(size) if fill else size) for _ in range(LAYERS)]

    def view(self, layer: int, block: int) -> memoryview:
        return memoryview(self.data[layer])[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def blocks(self, ids: list[int]) -> list[bytes]:
        return [bytes(self.view(layer, block)) for layer in range(LAYERS) for block in ids]


@dataclass
class TransferPair:
    """A producer that exports a prompt, and a consumer that has none of its blocks."""

    exports: Exports
    theirs: Memory
    mine: Memory
    source: TransferSource
    consumer: TransferEnd
    now: list[float]
    generation: int

    def compute(self, tokens: int = TOKENS) -> None:
        for layer in range(LAYERS):
            self.exports.wrote(layer, [Written("t", self.generation, tokens)])

    def fetch(self, skip: int = 0, **changed: object) -> list[int]:
        """Fetch the prompt into the consumer's first blocks, and return their ids."""
        into = list(range(len(PROMPT) - skip))
        consumer = dataclasses.replace(self.consumer, **changed)  # type: ignore[arg-type]
        fetch(self.source, [skip], [into], self.mine, consumer, Cancellation())
        return into

    def refused(self, **changed: object) -> Reason:
        with pytest.raises(TransferRefused) as refused:
            self.fetch(**changed)  # type: ignore[arg-type]
        return refused.value.reason


def serving(exports: Exports, timeout_s: float = 10.0, encrypt: bool = False) -> tuple[TransferServer, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])
    return TransferServer(listener, TransferEnd(4, 0, 1, timeout_s, SECRET, encrypt), exports), port


@pytest.fixture(params=[False, True], ids=["in clear", "encrypted"])
def pair(request: pytest.FixtureRequest) -> Iterator[TransferPair]:
    now = [0.0]
    theirs, mine = Memory(fill=True), Memory(fill=False)
    exports = Exports(theirs, BLOCK_TOKENS, lease_s=10, clock=lambda: now[0])
    server, port = serving(exports, encrypt=request.param)
    source = TransferSource("127.0.0.1", port, "t", 4, "p")
    generation = exports.open("t", [PROMPT], TOKENS, "p")
    consumer = dataclasses.replace(CONSUMER, encrypt=request.param)
    yield TransferPair(exports, theirs, mine, source, consumer, now, generation)
    server.close()


@pytest.mark.parametrize("skip", [0, 7])
def test_all_blocks_arrive_in_their_places(pair: TransferPair, skip: int) -> None:
    pair.compute()
    into = pair.fetch(skip)
    assert pair.mine.blocks(into) == pair.theirs.blocks(PROMPT[skip:])


def test_blocks_arrive_while_the_prefill_runs(pair: TransferPair) -> None:
    into = list(range(len(PROMPT)))
    fetching = threading.Thread(
        target=fetch, args=(pair.source, [0], [into], pair.mine, pair.consumer, Cancellation())
    )
    fetching.start()
    pair.compute(100)
    limit = time.monotonic() + 5
    while pair.mine.blocks([5]) != pair.theirs.blocks([PROMPT[5]]) and time.monotonic() < limit:
        time.sleep(0.01)
    assert pair.mine.blocks([5]) == pair.theirs.blocks([PROMPT[5]])
    assert fetching.is_alive()
    pair.compute()
    fetching.join(5)
    assert pair.mine.blocks(into) == pair.theirs.blocks(PROMPT)


def test_a_read_of_blocks_whose_lease_has_expired_is_refused(pair: TransferPair) -> None:
    """The blocks have been reused after the lease, so that NIXL would deliver the wrong bytes."""
    pair.compute()
    pair.exports.finish("t")
    pair.now[0] = 11
    reuse(pair.theirs)
    assert pair.refused() is Reason.EXPIRED


def test_a_transfer_that_takes_longer_than_a_lease_arrives(
    pair: TransferPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = pair.theirs.outgoing

    def slowly(*asked: Any) -> AbstractContextManager[list[memoryview]]:
        pair.now[0] += 6  # of a lease of 10; there are three layers
        return at_once(*asked)

    monkeypatch.setattr(pair.theirs, "outgoing", slowly)
    pair.compute()
    pair.exports.finish("t")
    assert pair.mine.blocks(pair.fetch()) == pair.theirs.blocks(PROMPT)
    assert pair.now[0] == 18


def test_a_producer_that_ignores_leases_sends_wrong_blocks() -> None:
    """A producer that never expires an export sends wrong blocks, so the test of expired leases can fail."""

    class CarelessExports(Exports):
        def expire(self, export: Export) -> None:
            return

    now = [0.0]
    theirs, mine = Memory(fill=True), Memory(fill=False)
    exports = CarelessExports(theirs, BLOCK_TOKENS, lease_s=10, clock=lambda: now[0])
    server, port = serving(exports)
    generation = exports.open("t", [PROMPT], TOKENS, "p")
    careless = TransferPair(
        exports,
        theirs,
        mine,
        TransferSource("127.0.0.1", port, "t", 4, "p"),
        CONSUMER,
        now,
        generation,
    )
    careless.compute()
    exports.finish("t")
    computed = theirs.blocks(PROMPT)
    now[0] = 11
    reuse(theirs)
    assert mine.blocks(careless.fetch()) != computed
    server.close()


def test_blocks_reused_during_a_read_are_not_accepted(pair: TransferPair) -> None:
    class ReusingMemory(Memory):
        reads = 0

        def view(self, layer: int, block: int) -> memoryview:
            self.reads += 1
            if self.reads == 50:
                pair.now[0] = 11  # the lease ends in the middle of the read
            return super().view(layer, block)

    pair.exports.memory = ReusingMemory(fill=True)
    pair.compute()
    pair.exports.finish("t")
    assert pair.refused() is Reason.EXPIRED


def test_blocks_are_sent_again_if_the_prefill_begins_again(pair: TransferPair) -> None:
    into = list(range(len(PROMPT)))
    fetching = threading.Thread(
        target=fetch, args=(pair.source, [0], [into], pair.mine, pair.consumer, Cancellation())
    )
    fetching.start()
    pair.compute(200)
    time.sleep(0.1)
    pair.exports.void("t")
    elsewhere = [block + 20 for block in PROMPT]
    pair.generation = pair.exports.open("t", [elsewhere], TOKENS, "p")
    pair.compute()
    fetching.join(5)
    assert pair.mine.blocks(into) == pair.theirs.blocks(elsewhere)


HANDSHAKE_BYTES = 20 + 32 + 20 + 32  # that the producer sends: CHALLENGE and ACCEPT
OF_A_FRAME = [0, 2, 4, 8, 12, 20, 20 + 16, 20 + 32 + 100, 20 + 32 + 29 * 4096 + 7]


@pytest.mark.parametrize("at", [*(HANDSHAKE_BYTES + at for at in OF_A_FRAME), 100_000])
def test_a_flipped_bit_on_the_way_is_refused(pair: TransferPair, at: int) -> None:
    """A bit is flipped in each field of a frame, in both of its tags, and in its blocks."""
    pair.compute()
    before = dataclasses.replace(pair.consumer, timeout_s=2.0)
    with FlippingProxy(pair.source.port, at) as port:
        pair.source, pair.consumer = dataclasses.replace(pair.source, port=port), before
        assert pair.refused() in (Reason.CORRUPT, Reason.PROTOCOL, Reason.STALLED, Reason.UNREACHABLE)


def test_swapped_blocks_are_refused(pair: TransferPair) -> None:
    """A man in the middle could otherwise swap two frames of equal size, across layers or connections."""
    pair.compute()
    with FrameSwappingProxy(pair.source.port) as port:
        pair.source = dataclasses.replace(pair.source, port=port)
        assert pair.refused() is Reason.CORRUPT


def test_recorded_messages_of_one_connection_are_refused_on_another_connection(pair: TransferPair) -> None:
    pair.compute()
    with FlippingProxy(pair.source.port) as port:
        recording = dataclasses.replace(pair.source, port=port)
        fetch(recording, [0], [list(range(len(PROMPT)))], pair.mine, pair.consumer, Cancellation())
        recorded = bytes(FlippingProxy.last)
    listener = socket.create_server(("127.0.0.1", 0))

    def replay() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(recorded)
            peer.recv(1 << 20)

    threading.Thread(target=replay, daemon=True).start()
    pair.source = dataclasses.replace(pair.source, port=int(listener.getsockname()[1]))
    assert pair.refused() is Reason.UNAUTHORISED
    listener.close()


def test_encrypted_prompts_are_not_readable_on_the_wire(pair: TransferPair) -> None:
    pair.compute()
    with FlippingProxy(pair.source.port) as port:
        pair.source = dataclasses.replace(pair.source, port=port)
        assert pair.mine.blocks(pair.fetch()) == pair.theirs.blocks(PROMPT)
    seen = [block in FlippingProxy.last for block in pair.theirs.blocks(PROMPT)]
    assert all(seen) is not any(not one for one in seen) and seen[0] is not pair.consumer.encrypt


def test_an_encrypting_and_a_plain_engine_refuse_each_other(pair: TransferPair) -> None:
    pair.compute()
    assert pair.refused(encrypt=not pair.consumer.encrypt) is Reason.MAPPING


def test_a_wrong_secret_is_refused_and_gets_no_block(pair: TransferPair) -> None:
    pair.compute()
    assert pair.refused(secret=b"another secret, as long") is Reason.UNAUTHORISED
    assert not any(any(data) for data in pair.mine.data)


def test_a_producer_without_the_secret_is_refused() -> None:
    """A producer without the secret could otherwise deliver KV that it made up."""
    impostor = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = impostor.accept()
        with peer:
            channel = wire.Channel(peer)
            channel.send_control(wire.Kind.CHALLENGE, bytes(32))
            channel.receive_control(wire.Kind.OPEN)
            channel.send_control(wire.Kind.ACCEPT, bytes(32))

    threading.Thread(target=answer, daemon=True).start()
    source = TransferSource("127.0.0.1", int(impostor.getsockname()[1]), "t", None, "p")
    with pytest.raises(TransferRefused, match="unauthorised"):
        fetch(source, [0], [[0]], Memory(fill=False), CONSUMER, Cancellation())
    impostor.close()


def test_a_fetch_for_an_older_epoch_is_refused(pair: TransferPair) -> None:
    pair.compute()
    pair.source = dataclasses.replace(pair.source, epoch=3)
    assert pair.refused() is Reason.OLD_EPOCH


def test_a_fetch_between_unequal_tensor_parallel_sizes_is_refused(pair: TransferPair) -> None:
    assert pair.refused(ranks=2) is Reason.MAPPING


def test_a_fetch_with_another_kv_layout_is_refused(pair: TransferPair) -> None:
    pair.mine.layout = "other"
    assert pair.refused() is Reason.LAYOUT


def test_a_fetch_is_given_up_if_the_prefill_stalls(pair: TransferPair) -> None:
    pair.compute(100)
    server, port = serving(pair.exports, timeout_s=0.2, encrypt=pair.consumer.encrypt)
    pair.source = dataclasses.replace(pair.source, port=port)
    assert pair.refused() is Reason.STALLED
    server.close()


def test_a_fetch_from_a_dead_producer_is_refused_as_unreachable(pair: TransferPair) -> None:
    pair.source = dataclasses.replace(pair.source, port=1)
    assert pair.refused() is Reason.UNREACHABLE


def test_a_cancelled_fetch_ends_early_and_frees_the_producer(pair: TransferPair) -> None:
    cancellation = Cancellation()
    threading.Timer(0.1, cancellation.cancel).start()
    start = time.monotonic()
    with pytest.raises(TransferRefused, match="cancelled"):
        fetch(pair.source, [0], [list(range(len(PROMPT)))], pair.mine, pair.consumer, cancellation)
    assert time.monotonic() - start < 8
    pair.compute()
    pair.exports.finish("t")
    assert eventually(lambda: pair.exports.take_released() == ["t"])


def test_a_delivered_or_dismissed_transfer_is_released(pair: TransferPair) -> None:
    pair.compute()
    pair.fetch()
    pair.exports.open("u", [[1]], BLOCK_TOKENS, "p")
    dismiss(dataclasses.replace(pair.source, transfer_id="u"), pair.mine, pair.consumer)
    pair.exports.finish("t")
    pair.exports.finish("u")
    released: list[str] = []

    def both() -> bool:
        released.extend(pair.exports.take_released())
        return sorted(released) == ["t", "u"]

    assert eventually(both)


def test_garbage_on_the_port_does_not_stop_the_server(pair: TransferPair) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), secrets.token_bytes(3000)):
        with socket.create_connection(("127.0.0.1", pair.source.port)) as peer:
            peer.sendall(garbage)
    pair.compute()
    assert pair.mine.blocks(pair.fetch()) == pair.theirs.blocks(PROMPT)


def reuse(memory: Memory) -> None:
    for layer in range(LAYERS):
        memory.data[layer][:] = bytes(len(memory.data[layer]))


def eventually(true: Callable[[], bool], limit_s: float = 5) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return False


class FlippingProxy:
    """Proxy that forwards all bytes, records those from the producer, and may flip one bit of these."""

    last = bytearray()

    def __init__(self, port: int, flip_at: int = -1) -> None:
        self._port, self._flip_at = port, flip_at
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self) -> int:
        threading.Thread(target=self._run, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def _run(self) -> None:
        consumer, _ = self._listener.accept()
        producer = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._pump, args=(consumer, producer), daemon=True).start()
        FlippingProxy.last = bytearray()
        self._pump(producer, consumer, self._changed)

    def _changed(self, data: bytearray) -> None:
        passed = len(FlippingProxy.last)
        FlippingProxy.last += data
        if passed <= self._flip_at < passed + len(data):
            data[self._flip_at - passed] ^= 1

    @staticmethod
    def _pump(
        source: socket.socket, target: socket.socket, change: Callable[[bytearray], None] = lambda data: None
    ) -> None:
        try:
            while data := bytearray(source.recv(65536)):
                change(data)
                target.sendall(data)
        except OSError:
            return
        target.close()


class FrameSwappingProxy(FlippingProxy):
    """Proxy that swaps the first two frames of blocks, but leaves the first 20 bytes of each in place."""

    def _run(self) -> None:
        consumer, _ = self._listener.accept()
        producer = socket.create_connection(("127.0.0.1", self._port))
        threading.Thread(target=self._pump, args=(consumer, producer), daemon=True).start()
        size = 20 + 16 + 16 + BLOCK_BYTES * len(PROMPT)
        try:
            for _ in range(2):  # CHALLENGE and, after the consumer's reply, ACCEPT
                consumer.sendall(wire.receive_exactly(producer, HANDSHAKE_BYTES // 2))
            first, second = (wire.receive_exactly(producer, size) for _ in range(2))
            consumer.sendall(first[:20] + second[20:] + second[:20] + first[20:])
            self._pump(producer, consumer)
        except OSError:
            return
