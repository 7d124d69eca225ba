"""The directory reports an overload in metrics, a log line and receipts before anything is dropped."""

import asyncio
import logging
from contextlib import suppress

import pytest
from prometheus_client import REGISTRY

from placement.overload.signal import OverloadReason
from placement.routing.least_kv import FirstTurn
from placement.routing.placer import Placer
from placement.routing.receipts import Placement
from placement.sizing.capacity import Thresholds
from router.directory.api.messages import Ask
from router.directory.fleet import CapacityWatcher
from router.directory.table import BindingTable
from router.directory.waiting import Waiter
from tests.support.engines import info, placer, state


def full_fleet() -> tuple[Placer, BindingTable]:
    """Return a directory with two decoders that are nearly full of running turns."""
    made = placer()
    table = BindingTable(100.0, made)
    for number in range(2):
        table.engine_up(info(f"d{number}"))
        table.engine_state(state(f"d{number}", seq=1, live=9_000), 0.0)
    return made, table


def wait_for_kv(table: BindingTable, tokens: int, turn: int = 1) -> Waiter:
    ask = Ask(key=f"c{turn}", gateway="g", prompt_tokens=tokens, wait_s=30.0, turn=turn)
    waiter = table.place(ask, 0.0, lambda outcome: None)
    assert isinstance(waiter, Waiter)
    return waiter


async def looked_once(made: Placer, table: BindingTable, now: float) -> None:
    watcher = CapacityWatcher(Thresholds(), made, table.conversations, table.refused_tokens, lambda: now)
    task = asyncio.create_task(watcher.run())
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def gauge(reason: OverloadReason) -> float | None:
    return REGISTRY.get_sample_value("conserve_overload", {"reason": reason.value})


async def test_the_directory_declares_an_overload_when_turns_wait_for_kv(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, table = full_fleet()
    caplog.set_level(logging.WARNING)
    wait_for_kv(table, 4_000)
    waiter = wait_for_kv(table, 3_000, turn=2)
    assert table.refused_tokens() == [4_000, 3_000]
    for second in range(4):
        made.observe_overload(float(second), table.refused_tokens())
    await looked_once(made, table, 4.0)
    assert gauge(OverloadReason.KV_SHORT) == 1 and gauge(OverloadReason.FITS) == 0
    asked = REGISTRY.get_sample_value("conserve_kv_asked")
    assert asked == pytest.approx((18_000 + 4_100 + 3_100) / 19_000)
    assert "overload=kv_short asked=1.33 held=0.95 lacking_tokens=6200" in caplog.text
    table.give_up(waiter)
    assert table.refused_tokens() == [4_000]


async def test_a_full_fleet_without_waiting_turns_is_no_overload(caplog: pytest.LogCaptureFixture) -> None:
    made, table = full_fleet()
    await looked_once(made, table, 1.0)
    assert gauge(OverloadReason.FITS) == 1 and gauge(OverloadReason.KV_SHORT) == 0
    assert "overload" not in caplog.text


def test_the_receipt_of_a_placement_during_an_overload_says_so() -> None:
    made, _ = full_fleet()
    for second in range(4):
        made.observe_overload(float(second), [7_000])
    placed = made.place(FirstTurn("small", 100), 1.0)
    assert isinstance(placed, Placement) and placed.receipt.to_json()["overload"] == "kv_short"
    for look in range(4, 40):
        for number in range(2):
            made.observe(state(f"d{number}", seq=look, live=1_000), float(look))
        made.observe_overload(float(look))
    placed = made.place(FirstTurn("later", 100), 40.0)
    assert isinstance(placed, Placement) and placed.receipt.to_json()["overload"] is None
