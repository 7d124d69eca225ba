"""KV of the prefix cache on its way beside serving: batches first on the link, what a batch reads before the
batch, for a bounded time, and home again but for what has changed. Without an engine."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.workers.overload import broken
from tests.workers.overload.workers_here import (
    LAYERS,
    USED,
    Group,
    WorkerHere,
    at_once,
    cached_drops,
    narrowing,
)
from workers.overload import exchange
from workers.overload.channel import PeerError
from workers.overload.exchange import KvBeside
from workers.overload.membership import SplitLimits
from workers.overload.orders import NarrowOrder, RestoreOrder, SplitEvent, SplitReport
from workers.overload.vllm_internals import BatchKv, blocks_in_batch

SLOW_S = 0.008  # of each message


@pytest.fixture
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """Two, or as many as is asked for. A message has one row, and a batch goes before all of them."""
    monkeypatch.setattr(exchange, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(exchange, "YIELD_S", 30.0)
    made = tuple(WorkerHere() for _ in range(getattr(request, "param", 2)))
    for engine in made:
        engine.split.take_report()
        engine.split.__class__ = broken.SlowToAnswer
        engine.split.slow_s = SLOW_S  # type: ignore[attr-defined]
        engine.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=15.0, beside_s=20.0)
    yield made
    for engine in made:
        engine.split.close()


def giving(engine: WorkerHere) -> KvBeside:
    assert engine.split.giving is not None
    return engine.split.giving


def split(group: Group) -> None:
    ended, _ = at_once(*cached_drops(*group))
    assert ended == [SplitEvent.SPLIT] * len(group)


def given(engine: WorkerHere) -> SplitReport:
    """What a step reports when no more of it goes."""
    giving(engine).end(20.0)
    report = engine.split.take_report()
    assert report is not None and report.event is SplitEvent.GIVEN
    return report


def all_given(group: Group) -> None:
    for engine in group:
        assert given(engine).rows == [] and engine.split.giving is None


def home(engine: WorkerHere, taken: list[int]) -> Callable[[], SplitReport]:
    """A restore, whose last step takes these blocks and those that have not come."""

    def step() -> SplitReport:
        begun = narrowing(engine, NarrowOrder(1, {}, USED))()
        assert begun.event is SplitEvent.NARROWED
        come = engine.until_loaded().rows
        used = [row for row in USED if row in taken or row not in come]
        return engine.step(lambda one: one.restore(RestoreOrder(1, used)))

    return step


def restored(group: Group, taken: list[int]) -> list[SplitReport]:
    reports: dict[int, SplitReport] = {}

    def kept(part: int) -> Callable[[], SplitReport]:
        return lambda: reports.setdefault(part, home(group[part], taken)())

    ended, _ = at_once(*(kept(part) for part in range(len(group))))
    assert ended == [SplitEvent.RESTORED] * len(group)
    return [reports[part] for part in range(len(group))]


def test_a_drop_does_not_wait_for_it_and_who_needs_some_gives_that_itself(group: Group) -> None:
    split(group)
    one = giving(group[0])
    assert len(one.left) > len(USED) - 3
    wanted = USED[-2:]
    assert one.claim([*wanted, 10_000], 10.0) == wanted
    assert not set(wanted) & set(one.left)
    assert len(one.left) > len(USED) - 6
    one.end(20.0)
    assert sorted(one.gone) == USED[:-2]


def test_what_is_flying_is_waited_for(group: Group) -> None:
    """Or it would come over what a batch has written there since."""
    split(group)
    one = giving(group[0])
    with group[1].device:  # nobody can write there
        time.sleep(0.1)
        row = one.left[0]
        with pytest.raises(PeerError, match="in time"):
            one.claim([row], 0.2)
    assert one.claim([row], 10.0) == []
    assert row in one.gone


def test_what_took_off_and_did_not_land_is_given_by_who_needs_it(group: Group) -> None:
    """The time is over in the middle of a piece: some of its layers are at the peer, and some are not."""
    for engine in group:
        engine.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=15.0, beside_s=0.3)
    split(group)
    one, mine = giving(group[0]), []
    with group[1].device:
        time.sleep(0.1)
        row = one.left[0]
        claims = threading.Thread(target=lambda: mine.extend(one.claim([row], 10.0)), daemon=True)
        claims.start()
        time.sleep(0.4)
    claims.join(10.0)
    assert mine == [row] and row not in one.left and row not in one.gone


def test_it_waits_while_a_batch_is_at_peers(group: Group) -> None:
    engine = group[0]
    with engine.split.link.batch():
        split(group)
        giving(group[1]).end(20.0)
        assert giving(engine).gone == [] and engine.split.link.beside_bytes == 0
    giving(engine).end(20.0)
    assert engine.split.link.beside_bytes == len(USED) * LAYERS // 2 * engine.split.kv.row_bytes


@pytest.mark.parametrize("group", [2, 3], indirect=True)
def test_it_comes_home_beside_serving(group: Group) -> None:
    split(group)
    all_given(group)
    reports = restored(group, [])
    assert [report.moved_bytes for report in reports] == [0] * len(group)  # while the engines stood still
    assert all(engine.whole and engine.has_all for engine in group)


def test_what_has_changed_since_it_came_is_taken_again(group: Group) -> None:
    """A batch of the first writes blocks in layers of the second that have come home already."""
    first, second = group
    split(group)
    all_given(group)
    changed = USED[::2]
    ended, _ = at_once(*(narrowing(engine, NarrowOrder(1, {}, USED)) for engine in group))
    assert ended == [SplitEvent.NARROWED] * 2
    for engine in group:
        assert sorted(engine.until_loaded().rows) == USED
    member = second.split.member
    assert member is not None
    for layer in member.kept:
        rows = [row + second.split.offset(member, 0) for row in changed]
        second.split.kv.write(layer, rows, second.split.kv.read(layer, rows) + 1.0)
        first.had[layer][[row - USED[0] for row in changed]] += 1.0
    at_once(
        lambda: first.step(lambda one: one.restore(RestoreOrder(1, changed))),
        lambda: second.step(lambda one: one.restore(RestoreOrder(1, []))),
    )
    assert all(engine.whole and engine.has_all for engine in group)


def test_what_has_not_come_home_in_time_is_taken_at_the_end(group: Group) -> None:
    split(group)
    all_given(group)
    for engine in group:
        engine.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=15.0, beside_s=0.2)
    reports = restored(group, [])
    assert all(report.moved_bytes > 0 for report in reports)
    assert all(engine.whole and engine.has_all for engine in group)


def test_after_a_while_no_more_goes_and_what_is_left_is_named(group: Group) -> None:
    for engine in group:
        engine.split.limits = SplitLimits(meet_s=5.0, answer_s=5.0, order_s=15.0, beside_s=0.3)
    split(group)
    for engine in group:
        one = giving(engine)
        left = given(engine).rows
        assert 0 < len(left) < len(USED) and sorted([*left, *one.gone]) == USED
        assert engine.split.giving is None and engine.split.take_report() is None


def test_a_peer_that_has_left_is_noticed_by_nobody_who_does_not_need_it(group: Group) -> None:
    split(group)
    second = group[1].split
    with group[1].device:
        member, second.member = second.member, None
    assert given(group[0]).rows
    second.member = member


def test_a_peer_that_does_not_answer_is_lost_to_the_next_batch(group: Group) -> None:
    """What it was sent may come at any time."""
    group[0].split.limits = SplitLimits(meet_s=5.0, answer_s=0.3, order_s=15.0, beside_s=20.0)
    split(group)
    one = giving(group[0])
    with group[1].device:
        one.end(5.0)
    assert given(group[0]).rows
    with pytest.raises(PeerError, match="not taken"):
        one.claim([], 1.0)
    lost = group[0].step(lambda each: each.narrow(NarrowOrder(1, {})))
    assert lost.event is SplitEvent.LOST and group[0].whole and group[0].split.giving is None


def test_of_a_batch_some_blocks_are_read_and_some_only_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that decodes in the middle of a block, one whose prompt begins there, and a new one."""
    table = torch.tensor([[5, 6, 7, 0], [8, 9, 1, 2], [3, 4, 77, 78]])  # what is behind is old
    starts, lens = torch.tensor([0, 1, 41, 61]), torch.tensor([33, 50, 20])
    batch = BatchKv(starts, lens, table, torch.zeros(61, dtype=torch.int64), 61, 40, 50)
    monkeypatch.setattr("workers.overload.vllm_internals.batch_in_model", lambda block_tokens: batch)
    reads, writes = blocks_in_batch(16)
    assert (sorted(reads), sorted(writes)) == ([5, 6, 8], [1, 2, 3, 4, 7, 9])
    monkeypatch.setattr("workers.overload.vllm_internals.batch_in_model", lambda block_tokens: None)
    assert blocks_in_batch(16) == ([], [])
