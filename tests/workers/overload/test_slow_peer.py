"""A peer that answers every message in time, but too slowly in total, delays an order by a bounded time."""

from collections.abc import Callable, Iterator

import pytest

from router.directory.dropping import CHANGE_S
from tests.workers.overload import broken
from tests.workers.overload.workers_here import LAYERS, LIMITS, USED, WorkerHere, at_once, drops, restores
from workers.engine.overload.orders import SplitEvent, SplitReport
from workers.engine.overload.plugin import FENCE_S
from workers.engine.overload.split.membership import SplitLimits

SLOW_S = 0.2  # delay of each of ten messages


@pytest.fixture
def engines() -> Iterator[tuple[WorkerHere, WorkerHere]]:
    made = WorkerHere(), WorkerHere()
    for engine in made:
        engine.model.take_report()
    yield made
    for engine in made:
        engine.model.close()


def slow(engine: WorkerHere) -> None:
    broken.break_with(engine.model, "SlowToAnswer")
    engine.model.service.slow_s = SLOW_S  # type: ignore[attr-defined]


def test_a_drop_with_a_slow_peer_ends_in_time_and_loses_nothing(
    engines: tuple[WorkerHere, WorkerHere],
) -> None:
    first, second = engines
    slow(second)
    ended, seconds = at_once(*drops(first, second))
    assert ended == [SplitEvent.NOT_SPLIT, SplitEvent.NOT_SPLIT]
    assert seconds < LIMITS.order_s + 0.7
    assert all(engine.whole and engine.has_all and not engine.split.lost for engine in engines)


def test_a_restore_with_a_slow_peer_ends_in_time_and_reports_the_loss(
    engines: tuple[WorkerHere, WorkerHere],
) -> None:
    first, second = engines
    ended, _ = at_once(*drops(first, second))
    assert ended == [SplitEvent.SPLIT, SplitEvent.SPLIT]
    assert not any(engine.whole for engine in engines)
    slow(second)
    ended, seconds = at_once(*restores(engines))
    assert ended == [SplitEvent.LOST, SplitEvent.RESTORED]
    assert seconds < LIMITS.order_s + 0.7
    assert first.whole and first.split.lost
    assert second.whole and second.has_all and not second.split.lost


def test_engines_are_split_and_restored_when_no_peer_is_slow(engines: tuple[WorkerHere, WorkerHere]) -> None:
    first, second = engines
    at_once(*drops(first, second))
    ended, _ = at_once(*restores(engines))
    assert ended == [SplitEvent.RESTORED, SplitEvent.RESTORED]
    assert all(engine.whole and engine.has_all for engine in engines)


def test_an_exchange_of_kv_measures_the_speed_of_the_link(engines: tuple[WorkerHere, WorkerHere]) -> None:
    """The first message is not measured, because it waits for the peer."""
    first, second = engines
    slow(second)
    first.split.limits = second.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=10.0)
    reports: dict[int, SplitReport] = {}

    def kept(part: int, step: Callable[[], SplitReport]) -> Callable[[], SplitReport]:
        return lambda: reports.setdefault(part, step())

    at_once(*(kept(part, step) for part, step in enumerate(drops(first, second))))
    messages = LAYERS // 2 - 1
    row_bytes = first.model.facts().row_bytes
    assert all(report.moved_bytes == messages * len(USED) * row_bytes for report in reports.values())
    assert reports[0].moved_s >= messages * SLOW_S > reports[1].moved_s


def test_the_directory_waits_for_a_drop_or_restore_longer_than_one_may_take() -> None:
    limits = SplitLimits()
    assert FENCE_S + limits.order_s < CHANGE_S["drop"]
    assert 2 * limits.order_s < CHANGE_S["restore"]
