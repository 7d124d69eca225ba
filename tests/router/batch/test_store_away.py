"""A store that is away a while: no result is lost, and no batch stays with a dispatcher that gave it up."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from router.batch.blobs import Blobs
from router.batch.ledger import Ledger
from router.batch.metrics import STEP_ERRORS
from router.batch.records import Result
from router.batch.steward import Steward
from router.batch.store.batches import VALIDATES
from router.batch.store.store import Store

AWAY = OperationalError("UPDATE", {}, ConnectionError("the store is away"))


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    made = Store(sqlite_url)
    yield made
    made.close()


def failing_once(work: Callable[..., Any]) -> Callable[..., Any]:
    failures = [AWAY]

    def once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return work(*args)

    return once


def test_a_batch_whose_work_failed_is_handed_back_when_the_store_is_there_again(
    store: Store, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FaultyIntake:
        def validate(self, *_: object) -> None:
            raise AWAY

    for dispatcher in ("d", "other"):
        store.requests.heartbeat(dispatcher, 0, 10.0)
    store.batches.create("b", "o", "/v1/completions", "f", "24h", 86_400, None, None, 0)
    intake: Any = FaultyIntake()
    steward = Steward(store, Blobs(str(tmp_path / "files")), intake, "d", 0.0, clock=lambda: 0.0)
    monkeypatch.setattr(store.batches, "hand_back", failing_once(store.batches.hand_back))
    with pytest.raises(OperationalError):
        steward.take_in()
    assert store.batches.take_up("other", VALIDATES) is None  # still in the name of `d`
    with pytest.raises(OperationalError):
        steward.see_out()  # the store is still away
    assert not steward.see_out()
    assert store.batches.take_up("other", VALIDATES) is not None


async def test_results_are_written_when_the_store_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.batch.ledger._RETRY_S", 0.0)
    written: list[int] = []

    all_written = asyncio.Event()

    class Requests:
        @staticmethod
        def record(results: list[Result]) -> set[tuple[int, int]]:
            written.extend(result.line for result in results)
            if len(written) == 3:
                all_written.set()
            return {(result.batch, result.line) for result in results}

    class Away:
        requests = Requests

    async def in_thread(work: Callable[[], None]) -> None:
        await asyncio.sleep(0)
        work()

    monkeypatch.setattr(Requests, "record", failing_once(Requests.record))
    failed = STEP_ERRORS.labels("store")._value.get()
    ledger = Ledger(Away, "d", in_thread)  # type: ignore[arg-type]
    running = asyncio.create_task(ledger.run())
    try:
        for line in (1, 2, 3):
            ledger.result(Result(1, line, 200, b"{}", "r"))
            await asyncio.sleep(0)  # one arrives while another is written
        async with asyncio.timeout(10):
            await all_written.wait()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert sorted(written) == [1, 2, 3]
    assert STEP_ERRORS.labels("store")._value.get() == failed + 1
