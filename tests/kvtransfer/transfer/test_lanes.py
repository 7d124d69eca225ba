"""KV sent over several connections arrives completely and once, and a failure ends all connections."""

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest

from kvtransfer.metrics import Reason
from kvtransfer.transfer import peers
from kvtransfer.transfer.exports import Exports, Reader, Written
from kvtransfer.transfer.peers import Cancellation, TransferSource, fetch, layers_by_lane
from kvtransfer.transfer.wire import TransferRefused
from tests.kvtransfer.transfer.test_delivery import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CONSUMER,
    LAYERS,
    PROMPT,
    TOKENS,
    Memory,
    eventually,
    serving,
)

MIB = 1 << 20
INTO = list(range(len(PROMPT)))


@pytest.fixture
def a_lane_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LANE_BYTES", 1)


def test_connections_get_about_equal_bytes_and_a_small_prompt_has_one_connection() -> None:
    assert layers_by_lane([MIB] * 8) == [list(range(8))]
    assert layers_by_lane([32 * MIB] * 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    unlike = [256 * MIB if layer % 6 == 5 else 16 * MIB for layer in range(48)]
    shares = layers_by_lane(unlike)
    assert sorted(layer for share in shares for layer in share) == list(range(48))
    loads = [sum(unlike[layer] for layer in share) for share in shares]
    assert max(loads) - min(loads) <= 256 * MIB
    assert layers_by_lane([0] * 4) == [[0, 1, 2, 3]]


def test_each_connection_has_a_layer_that_is_sent_while_the_prompt_is_computed() -> None:
    """A connection that had only layers with windows or states would be silent until the prompt's end."""
    hybrid = [0, 0, 0, 256 * MIB] * 3
    assert [[layer for layer in share if layer % 4 == 3] for share in layers_by_lane(hybrid)] == [
        [3],
        [7],
        [11],
    ]
    assert layers_by_lane([0, 0, 0, 128 * MIB]) == [[0, 1, 2, 3]]
    assert layers_by_lane([100 * MIB, 90 * MIB, 90 * MIB, 100 * MIB]) == [[0, 1], [2, 3]]


@pytest.mark.usefixtures("a_lane_a_layer")
@pytest.mark.parametrize("encrypt", [False, True])
def test_a_prompt_arrives_completely_over_several_connections(encrypt: bool) -> None:
    theirs, mine = Memory(fill=True), Memory(fill=False)
    mine.piece_bytes = 3 * BLOCK_BYTES - 1  # the consumer takes fewer bytes at a time than the producer
    exports = Exports(theirs, BLOCK_TOKENS, lease_s=10, clock=lambda: 0.0)
    server, port = serving(exports, encrypt=encrypt)
    generation = exports.open("t", [PROMPT], TOKENS, "p")
    for layer in range(LAYERS):
        exports.wrote(layer, [Written("t", generation, TOKENS)])
    exports.finish("t")
    consumer = dataclasses.replace(CONSUMER, encrypt=encrypt)
    received = fetch(
        TransferSource("127.0.0.1", port, "t", 4, "p"), [0], [INTO], mine, consumer, Cancellation()
    )
    assert received == LAYERS * len(PROMPT) * BLOCK_BYTES
    assert mine.blocks(INTO) == theirs.blocks(PROMPT)
    assert eventually(lambda: exports.take_released() == ["t"])
    server.close()


def two_lanes() -> tuple[Exports, list[list[int]]]:
    exports = Exports(Memory(fill=True), BLOCK_TOKENS, lease_s=10, clock=lambda: 0.0)
    exports.open("t", [PROMPT], TOKENS, "p")
    exports.finish("t")
    return exports, [[0, 2], [1]]


def test_an_ended_connection_does_not_release_blocks_that_another_connection_reads() -> None:
    exports, shares = two_lanes()
    first, second = (exports.attach("t", "p", [0], 0, layers, 2) for layers in shares)
    exports.delivered(first)
    assert exports.take_released() == []
    exports.delivered(second)
    assert exports.take_released() == ["t"]


def test_an_export_ends_on_all_connections_when_the_consumer_is_lost_on_one() -> None:
    exports, shares = two_lanes()
    first, second = (exports.attach("t", "p", [0], 0, layers, 2) for layers in shares)
    exports.leave(first)
    with pytest.raises(TransferRefused, match="taken"):
        exports.wait_ready(second, 1)


@pytest.mark.parametrize("layers", [[0, LAYERS], [1, 1]])
def test_missing_and_repeated_layers_are_refused(layers: list[int]) -> None:
    exports, _ = two_lanes()
    with pytest.raises(TransferRefused) as refused:
        exports.attach("t", "p", [0], 0, layers, 2)
    assert refused.value.reason is Reason.PROTOCOL


@pytest.mark.usefixtures("a_lane_a_layer")
def test_a_transfer_ends_on_all_connections_and_reports_the_reason_when_one_fails() -> None:
    class FailingMemory(Memory):
        def incoming(
            self, layer: int, blocks: Sequence[int], wait_s: float
        ) -> AbstractContextManager[list[memoryview]]:
            raise TransferRefused(Reason.CORRUPT)

    class SilentExports(Exports):
        def leave(self, reader: Reader) -> None:
            """Do not end the export, so that the consumer itself has to end its other connections."""

    exports = SilentExports(Memory(fill=True), BLOCK_TOKENS, lease_s=10, clock=lambda: 0.0)
    server, port = serving(exports)
    generation = exports.open("t", [PROMPT], TOKENS, "p")
    exports.wrote(1, [Written("t", generation, TOKENS)])  # connections 0 and 2 wait for their layers
    began = time.monotonic()
    with pytest.raises(TransferRefused) as refused:
        source = TransferSource("127.0.0.1", port, "t", 4, "p")
        fetch(source, [0], [INTO], FailingMemory(fill=False), CONSUMER, Cancellation())
    assert refused.value.reason is Reason.CORRUPT and time.monotonic() - began < 5
    server.close()
