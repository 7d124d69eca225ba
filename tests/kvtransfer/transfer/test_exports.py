"""Only valid blocks of an export are sent: computed ones of the current generation, within the lease."""

import threading
import time

import pytest

from kvtransfer.metrics import Reason
from kvtransfer.transfer.exports import Exports, Written
from kvtransfer.transfer.kv_memory import BlockMemory
from kvtransfer.transfer.wire import TransferRefused
from tests.support.clock import Clock

LAYERS, BLOCK = 2, 16


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exports(clock: Clock) -> Exports:
    memory = BlockMemory()
    memory.layers = tuple(f"layer{n}" for n in range(LAYERS))
    memory.groups = (0,) * LAYERS
    return Exports(memory, BLOCK, lease_s=10, clock=clock)


def refusal(exports: Exports, transfer_id: str) -> Reason:
    with pytest.raises(TransferRefused) as refused:
        exports.attach(transfer_id, "p", skip=[0], wait_s=0)
    return refused.value.reason


def fill(exports: Exports, tokens: int, generation: int) -> None:
    for layer in range(LAYERS):
        exports.wrote(layer, [Written("t", generation, tokens)])


def test_only_full_computed_blocks_are_ready_until_the_prompt_is_complete(
    exports: Exports,
) -> None:
    opened = exports.open("t", [[7, 8, 9]], total_tokens=40, prompt="p")
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    exports.wrote(1, [Written("t", opened, 35)])
    assert exports.wait_ready(reader, 0).runs == [(1, 0, [7, 8])]
    fill(exports, 40, opened)
    ready = exports.wait_ready(reader, 0)
    assert ready.runs == [(0, 0, [7, 8, 9]), (1, 2, [9])]
    assert ready.complete


def test_blocks_the_consumer_has_are_not_sent(exports: Exports) -> None:
    opened = exports.open("t", [[7, 8, 9]], total_tokens=48, prompt="p")
    fill(exports, 48, opened)
    reader = exports.attach("t", "p", skip=[2], wait_s=0)
    assert exports.wait_ready(reader, 0).runs == [(0, 2, [9]), (1, 2, [9])]


def test_a_read_is_refused_after_the_lease_even_if_it_began_before(exports: Exports, clock: Clock) -> None:
    opened = exports.open("t", [[1]], total_tokens=16, prompt="p")
    fill(exports, 16, opened)
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    exports.finish("t")
    clock.now = 10
    with pytest.raises(TransferRefused, match="expired"):
        exports.confirm(reader, reader.generation)
    assert exports.take_released() == ["t"]
    assert refusal(exports, "t") is Reason.EXPIRED


def test_the_lease_begins_when_the_prefill_ends(exports: Exports, clock: Clock) -> None:
    exports.open("t", [[1]], total_tokens=16, prompt="p")
    clock.now = 1000
    assert exports.take_released() == []
    exports.finish("t")
    clock.now = 1009
    assert exports.take_released() == []
    clock.now = 1010
    assert exports.take_released() == ["t"]


def test_a_prefill_that_lost_its_blocks_is_read_again_from_the_start(exports: Exports) -> None:
    opened = exports.open("t", [[1, 2]], total_tokens=32, prompt="p")
    fill(exports, 32, opened)
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    before = exports.wait_ready(reader, 0).generation
    exports.void("t")
    assert not exports.confirm(reader, before)
    opened = exports.open("t", [[5, 6]], total_tokens=32, prompt="p")
    fill(exports, 32, opened)
    after = exports.wait_ready(reader, 0)
    assert after.generation != before
    assert after.runs == [(0, 0, [5, 6]), (1, 0, [5, 6])]


def test_progress_on_old_blocks_does_not_count_for_new_blocks(exports: Exports) -> None:
    before = exports.open("t", [[1, 2]], total_tokens=32, prompt="p")
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    exports.void("t")
    exports.open("t", [[5, 6]], total_tokens=32, prompt="p")
    fill(exports, 32, before)
    with pytest.raises(TransferRefused, match="stalled"):
        exports.wait_ready(reader, 0.01)


def test_current_and_later_readers_of_an_aborted_prefill_are_refused(exports: Exports) -> None:
    exports.open("t", [[1]], total_tokens=16, prompt="p")
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    exports.abort("t")
    with pytest.raises(TransferRefused, match="aborted"):
        exports.wait_ready(reader, 5)
    assert refusal(exports, "t") is Reason.ABORTED
    assert len(exports) == 0


def test_blocks_are_released_only_once_they_are_delivered_and_the_prefill_has_finished(
    exports: Exports,
) -> None:
    exports.open("t", [[1]], total_tokens=16, prompt="p")
    exports.leave(exports.attach("t", "p", skip=[0], wait_s=0))
    assert exports.take_released() == []
    exports.finish("t")
    assert exports.take_released() == ["t"]
    assert refusal(exports, "t") is Reason.TAKEN


def test_a_dismissed_export_holds_nothing_even_if_dismissed_before_it_begins(exports: Exports) -> None:
    exports.dismiss("early")
    exports.open("early", [[1]], total_tokens=16, prompt="p")
    exports.open("late", [[2]], total_tokens=16, prompt="p")
    exports.dismiss("late")
    exports.finish("early")
    exports.finish("late")
    assert exports.take_released() == ["early", "late"]


def test_a_consumer_may_connect_before_the_prefill(exports: Exports) -> None:
    threading.Timer(0.05, exports.open, ("t", [[1]], 16, "p")).start()
    assert exports.attach("t", "p", skip=[0], wait_s=5).export.transfer_id == "t"


def test_a_consumer_stops_waiting_for_a_prefill_that_never_begins(exports: Exports) -> None:
    start = time.monotonic()
    with pytest.raises(TransferRefused, match="unknown"):
        exports.attach("t", "p", skip=[0], wait_s=0.05)
    assert time.monotonic() - start < 2


def test_legs_with_different_prompts_are_refused(exports: Exports) -> None:
    exports.open("t", [[1]], total_tokens=16, prompt="p")
    with pytest.raises(TransferRefused, match="prompt"):
        exports.attach("t", "another", skip=[0], wait_s=0)


def test_a_lease_is_renewed_while_its_consumer_reads(exports: Exports, clock: Clock) -> None:
    """Sending a long prompt may take longer than a lease."""
    opened = exports.open("t", [[1]], total_tokens=16, prompt="p")
    fill(exports, 16, opened)
    reader = exports.attach("t", "p", skip=[0], wait_s=0)
    exports.renew(reader)  # while the prefill runs there is no lease
    exports.finish("t")
    for clock.now in (9, 18, 27):
        exports.renew(reader)
        assert exports.take_released() == []
    clock.now = 37
    with pytest.raises(TransferRefused, match="expired"):
        exports.renew(reader)
    assert exports.take_released() == ["t"]
