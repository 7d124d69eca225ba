"""KV of the prefix cache on its way beside serving: batches first on the link, what a batch reads before the
batch, and back home with what has changed meanwhile. Without an engine."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.workers.overload import broken
from tests.workers.overload.workers_here import (
    LAYERS,
    USED,
    WorkerHere,
    at_once,
    cached_drops,
    narrowing,
)
from workers.overload import exchange
from workers.overload.errors import PeerError
from workers.overload.exchange import KvBeside
from workers.overload.membership import SplitLimits
from workers.overload.metrics import SplitEvent
from workers.overload.orders import NarrowOrder, RestoreOrder, SplitReport

SLOW_S = 0.008  # of each message


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerHere, WorkerHere]]:
    """A message has one row, and a batch that is at peers goes before all of them."""
    monkeypatch.setattr(exchange, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(exchange, "YIELD_S", 30.0)
    made = WorkerHere(), WorkerHere()
    for engine in made:
        engine.split.take_report()
        engine.split.__class__ = broken.SlowToAnswer
        engine.split.slow_s = SLOW_S  # type: ignore[attr-defined]
        engine.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=15.0)
    yield made
    for engine in made:
        engine.split.close()


def giving(engine: WorkerHere) -> KvBeside:
    assert engine.split.giving is not None
    return engine.split.giving


def split(pair: tuple[WorkerHere, WorkerHere]) -> None:
    ended, _ = at_once(*cached_drops(*pair))
    assert ended == [SplitEvent.SPLIT] * 2


def home(engine: WorkerHere, unchanged: list[int]) -> Callable[[], SplitReport]:
    def step() -> SplitReport:
        begun = narrowing(engine, NarrowOrder(1, {}, USED))()
        assert begun.event is SplitEvent.NARROWED
        engine.until_loaded()
        return engine.step(lambda one: one.restore(RestoreOrder(1, USED, unchanged)))

    return step


def restored(pair: tuple[WorkerHere, WorkerHere], unchanged: list[int]) -> list[SplitReport]:
    reports: dict[int, SplitReport] = {}

    def kept(part: int) -> Callable[[], SplitReport]:
        return lambda: reports.setdefault(part, home(pair[part], unchanged)())

    ended, _ = at_once(kept(0), kept(1))
    assert ended == [SplitEvent.RESTORED] * 2
    return [reports[0], reports[1]]


def test_a_drop_does_not_wait_for_it_and_what_is_wanted_goes_first(
    pair: tuple[WorkerHere, WorkerHere],
) -> None:
    split(pair)
    one = giving(pair[0])
    assert len(one.on_the_way(USED)) > len(USED) - 3
    one.first([USED[-1], USED[-2]], 10.0)
    assert one.on_the_way([USED[-1], USED[-2]]) == []
    assert len(one.on_the_way(USED)) > len(USED) - 6
    one.all(20.0)
    assert one.on_the_way(USED) == []


def test_it_waits_while_a_batch_is_at_peers(pair: tuple[WorkerHere, WorkerHere]) -> None:
    engine = pair[0]
    with engine.split.link.batch():
        split(pair)
        giving(pair[1]).all(20.0)
        assert giving(engine).on_the_way(USED) == USED
        giving(engine).first(USED[:1], 10.0)  # a batch needs it
        assert giving(engine).on_the_way(USED) == USED[1:]
        assert engine.split.link.beside_bytes == LAYERS // 2 * engine.split.kv.row_bytes
    giving(engine).all(20.0)


def test_it_comes_home_beside_serving(pair: tuple[WorkerHere, WorkerHere]) -> None:
    split(pair)
    reports = restored(pair, USED)
    assert [report.moved_bytes for report in reports] == [0, 0]  # while the engines stood still
    assert all(engine.whole and engine.has_all for engine in pair)


@pytest.mark.parametrize("unchanged", [[], USED[::2]])
def test_what_has_changed_since_is_taken_again(
    pair: tuple[WorkerHere, WorkerHere], unchanged: list[int]
) -> None:
    first, second = pair
    split(pair)
    for engine in pair:
        giving(engine).all(20.0)
    member = second.split.member
    assert member is not None
    changed = [row for row in USED if row not in unchanged]
    began = threading.Event()

    def meanwhile() -> None:
        """A batch of the first writes blocks in layers of the second that have come home already."""
        fetching = first.split.fetching
        while fetching is None or fetching.on_the_way(USED):
            time.sleep(0.001)
            fetching = first.split.fetching
        for layer in member.kept:
            rows = [row + second.split.offset(member, 0) for row in changed]
            second.split.kv.write(layer, rows, second.split.kv.read(layer, rows) + 1.0)
            first.had[layer][[row - USED[0] for row in changed]] += 1.0
        began.set()

    writer = threading.Thread(target=meanwhile, daemon=True)
    second.split.weights.__class__ = broken.SlowToReturn
    writer.start()
    restored(pair, unchanged)
    assert began.is_set() and first.has_all and second.has_all


def test_who_needs_it_learns_that_the_peer_is_gone(pair: tuple[WorkerHere, WorkerHere]) -> None:
    split(pair)
    second = pair[1].split
    with pair[1].device:
        member = second.member
        assert member is not None
        second.member = None  # it has left
    with pytest.raises(PeerError):
        giving(pair[0]).first(USED, 10.0)
    second.member = member


def test_who_needs_it_waits_for_a_bounded_time(pair: tuple[WorkerHere, WorkerHere]) -> None:
    split(pair)
    began = time.monotonic()
    with pair[1].device, pytest.raises(PeerError, match="in time"):
        giving(pair[0]).first(USED, 0.3)
    assert time.monotonic() - began < 3.0
