"""Parameters come back beside serving: what is where meanwhile, what peers may ask, and what goes wrong in
the middle of it. Without an engine; with one in test_split_engines.py."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvtransfer.feed import FeedCommand
from tests.workers.overload import broken
from tests.workers.overload.workers_here import (
    BLOCKS,
    LAYERS,
    LIMITS,
    SECRET,
    USED,
    Group,
    a_batch,
    at_once,
    engine_with_a_pool,
    leaving,
    narrows,
    scheduler_side,
    split,
)
from workers.overload.channel import Message, PeerAsk, PeerConnection, PeerRefused, SplitOver
from workers.overload.membership import SplitLimits
from workers.overload.memory import LayerWeights
from workers.overload.orders import NarrowOrder, RestoreOrder, SplitEvent, SplitReport
from workers.overload.plugin import AGAIN_S, OverloadScheduler


def narrowed(group: Group) -> None:
    split(group)
    ended, _ = at_once(*narrows(group))
    assert ended == [SplitEvent.NARROWED] * len(group)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_meanwhile_each_has_its_rows_in_smaller_regions(four: Group, size: int) -> None:
    group = four[:size]
    narrowed(group)
    for keeper in group:
        member = keeper.split.member
        assert member is not None and member.blocks == BLOCKS
        for part, owner in enumerate(group):
            rows = [row + member.region(part) for row in USED]
            for layer in member.kept:
                assert torch.equal(keeper.split.kv.read(layer, rows), owner.had[layer])
    seconds = [worker.until_loaded().seconds for worker in group]
    assert all(0 < taken < 10 for taken in seconds)
    ended, _ = at_once(*(leaving(worker) for worker in group))
    assert ended == [SplitEvent.RESTORED] * size
    assert all(worker.whole and worker.has_all and worker.has_its_parameters for worker in group)


def test_of_even_parts_all_parameters_are_here_before_the_last_step(four: Group) -> None:
    narrowed(four[:2])
    for worker in four[:2]:
        worker.until_loaded()
        assert worker.split.is_split and worker.split.weights.held_bytes() == worker.parameters


def test_who_keeps_more_than_its_share_brings_the_rest_with_the_last_step(four: Group) -> None:
    """Twenty layers of three: one of them keeps six, and the others seven."""
    three = four[:3]
    narrowed(three)
    for worker in three:
        worker.until_loaded()
    held = [worker.split.weights.held_bytes() == worker.parameters for worker in three]
    assert any(held) and not all(held)
    ended, _ = at_once(*(leaving(worker) for worker in three))
    assert ended == [SplitEvent.RESTORED] * 3
    assert all(worker.whole and worker.has_its_parameters for worker in three)


def test_nobody_leaves_before_all_have_their_parameters(four: Group) -> None:
    first, second = four[:2]
    second.split.weights.__class__ = broken.SlowToReturn
    second.split.weights.slow_s = 0.05  # type: ignore[attr-defined]
    narrowed((first, second))
    assert first.until_loaded().seconds >= 0.05 * LAYERS / 2
    assert second.split.weights.held_bytes() == second.parameters


def test_a_copy_that_fails_is_made_with_the_last_step(four: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = four[:2]

    def fails(target: torch.Tensor, source: torch.Tensor) -> None:
        raise RuntimeError("an error of the device")

    monkeypatch.setattr(first.memory.driver, "copy_beside", fails)
    narrowed((first, second))
    first.until_loaded()
    second.until_loaded()
    ended, _ = at_once(leaving(first), leaving(second))
    assert ended == [SplitEvent.RESTORED] * 2
    assert first.whole and first.has_all and first.has_its_parameters


def test_a_peer_that_is_lost_meanwhile_costs_its_kv_and_no_parameters(four: Group) -> None:
    """In the middle of a layer's copy."""
    first, second = four[:2]
    first.split.weights.__class__ = broken.SlowToReturn
    narrowed((first, second))
    member = first.split.member
    assert member is not None
    for line in member.lines.values():
        line.close()
    report = first.step(lambda one: one.restore(RestoreOrder(1, USED)))
    assert report.event is SplitEvent.LOST and first.split.lost
    assert first.whole and first.has_its_parameters
    assert first.split.take_report() is None  # what is loaded belongs to a split that is over


def test_batches_are_of_pools_of_one_size(four: Group) -> None:
    split(four[:3])
    first = four[0]
    line = PeerConnection(first.split.facts().address, SECRET, 5.0)
    values, tensors = a_batch()
    first.split.limits = replace(LIMITS, meet_s=0.2)
    with pytest.raises(PeerRefused, match="has not come so far"):
        line.ask(Message(PeerAsk.RUN, 1, {**values, "narrow": True}, tensors))
    first.split.limits = LIMITS
    ended, _ = at_once(*narrows(four[:3]))
    assert ended == [SplitEvent.NARROWED] * 3
    with pytest.raises(SplitOver, match="pools of epoch 1 are smaller here"):
        line.ask(Message(PeerAsk.RUN, 1, values, tensors))
    line.close()


def test_a_member_that_does_not_come_leaves_the_others_split(four: Group) -> None:
    three = four[:3]
    split(three)
    for worker in three:
        worker.split.limits = replace(LIMITS, meet_s=0.3)
    ended, _ = at_once(*narrows(three)[:2])
    assert ended == [SplitEvent.NOT_RESTORED] * 2
    assert all(worker.split.is_split and not worker.split.lost for worker in three)
    for worker in three:
        worker.split.limits = replace(LIMITS, order_s=10.0)
    ended, _ = at_once(*narrows(three))
    assert ended == [SplitEvent.NARROWED] * 3


def test_who_was_seen_by_one_and_given_up_by_another_takes_none_with_it(four: Group) -> None:
    """The last gives the first up; the second comes while the last is there, and sees the first come."""
    three = four[:3]
    split(three)
    for worker, meet_s in zip(three, (0.4, 0.6, 0.6), strict=True):
        worker.split.limits = replace(LIMITS, meet_s=meet_s, order_s=10.0)
    begin = narrows(three)

    def later(seconds: float, step: Callable[[], SplitReport]) -> Callable[[], SplitReport]:
        def begun() -> SplitReport:
            time.sleep(seconds)
            return step()

        return begun

    ended, _ = at_once(later(0.5, begin[0]), later(0.2, begin[1]), begin[2])
    assert ended == [SplitEvent.NOT_RESTORED] * 3
    assert all(worker.split.is_split and not worker.split.lost for worker in three)


def test_who_is_late_for_the_last_try_is_lost(four: Group) -> None:
    first, second = four[:2]
    narrowed((first, second))
    first.until_loaded()
    second.split.limits = replace(LIMITS, meet_s=0.2)
    late = first.step(lambda one: one.restore(RestoreOrder(1, USED)))
    assert late.event is SplitEvent.NOT_RESTORED and first.split.is_split
    lost = first.step(lambda one: one.restore(RestoreOrder(1, USED, last=True)))
    assert lost.event is SplitEvent.LOST and first.whole and first.has_its_parameters


def test_who_has_more_kv_to_take_is_waited_for(four: Group) -> None:
    """As long as an order lasts: who has none would be whole, and the other's KV gone with it."""
    first, second = four[:2]
    narrowed((first, second))
    for worker in (first, second):
        worker.until_loaded()
        worker.split.limits = SplitLimits(meet_s=0.3, order_s=10.0)
    first.split.__class__ = broken.SlowToAnswer
    first.split.slow_s = 2.0 / LAYERS  # type: ignore[attr-defined]
    ended, seconds = at_once(
        lambda: first.step(lambda one: one.restore(RestoreOrder(1, []))),
        lambda: second.step(lambda one: one.restore(RestoreOrder(1, USED))),
    )
    assert ended == [SplitEvent.RESTORED] * 2 and seconds > 0.9
    assert second.has_all and second.whole and first.whole


class ReturningSide:
    """The scheduler's side of an engine in a restore."""

    def __init__(self) -> None:
        self.now = 100.0
        self.side: OverloadScheduler = scheduler_side("a:1", layers=4, clock=lambda: self.now)
        self.engine = engine_with_a_pool()
        self.told(SplitEvent.SPLIT, BLOCKS + 8)

    def told(self, event: SplitEvent, blocks: int = BLOCKS) -> None:
        self.side.after_step(self.engine, SplitReport(event, 1, blocks))

    def ordered(self) -> object:
        self.side.between_steps(self.engine)
        return self.side.order(None)


@pytest.fixture
def returning(monkeypatch: pytest.MonkeyPatch) -> ReturningSide:
    """Its pool has shrunk."""
    monkeypatch.setattr("workers.overload.vllm_internals.shrink", lambda scheduler, blocks: {9: 3})
    monkeypatch.setattr("workers.overload.vllm_internals.used_blocks", lambda pool: ([1, 3], []))
    made = ReturningSide()
    assert made.side.restore(FeedCommand("restore", epoch=1)).done
    assert made.ordered() == NarrowOrder(1, {9: 3})
    made.told(SplitEvent.NARROWED)
    return made


def test_a_restore_is_two_orders_and_is_under_way_between_them(returning: ReturningSide) -> None:
    side = returning.side
    assert side.returning and side.pending and returning.ordered() is None
    assert "under way" in side.drop(FeedCommand("drop", epoch=2, members=("a:1", "b:1"), part=0)).error
    returning.told(SplitEvent.LOADED)
    assert returning.ordered() == RestoreOrder(1, [1, 3])
    returning.told(SplitEvent.RESTORED)
    assert not side.pending and not side.returning and returning.ordered() is None
    seen = side.take_observations()
    assert {name: len(seconds) for name, seconds in seen.items()} == {
        "drop_seconds": 1,
        "restore_seconds": 1,
        "return_seconds": 1,
    }
    assert side.take_counts() == {"splits.split": 1, "splits.restored": 1}


def test_its_end_is_tried_again_where_a_peer_was_late(returning: ReturningSide) -> None:
    returning.told(SplitEvent.LOADED)
    assert returning.ordered() == RestoreOrder(1, [1, 3])
    returning.told(SplitEvent.NOT_RESTORED)
    assert returning.side.returning and returning.ordered() is None
    returning.now += AGAIN_S
    assert returning.ordered() == RestoreOrder(1, [1, 3])
    returning.told(SplitEvent.NOT_RESTORED)
    returning.now += AGAIN_S
    assert returning.ordered() == RestoreOrder(1, [1, 3], last=True)
    returning.told(SplitEvent.RESTORED)
    assert not returning.side.pending


def test_nothing_of_it_is_left_where_the_peer_is_lost(
    returning: ReturningSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.overload.vllm_internals.start_over", lambda scheduler, blocks: None)
    returning.told(SplitEvent.LOST)
    assert not returning.side.pending and returning.ordered() is None


def test_layers_that_are_here_do_not_come_again(four: Group) -> None:
    weights = four[0].split.weights
    assert isinstance(weights, LayerWeights) and all(map(weights.bring_back, range(LAYERS)))
