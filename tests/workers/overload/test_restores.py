"""KV and parameters are restored even if a member is late or lost (workers without engines)."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvtransfer.control.control_socket import EngineCommand
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
    restores,
    restoring,
    scheduler_side,
    split,
)
from workers.engine.overload.orders import RestoreOrder, SplitEvent, SplitReport
from workers.engine.overload.plugin import OverloadScheduler
from workers.engine.overload.split.peer_link import Message, MessageKind, PeerConnection, SplitEnded


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_member_has_its_parameters_and_kv_after_a_restore(four: Group, size: int) -> None:
    group = four[:size]
    split(group)
    ended, _ = at_once(*restores(group))
    assert ended == [SplitEvent.RESTORED] * size
    assert all(worker.whole and worker.has_all and worker.has_its_parameters for worker in group)


def test_renumbered_blocks_have_their_content_after_a_restore(four: Group) -> None:
    first, second = four[:2]
    split((first, second))
    high = {USED[-1] + 1: USED[-1]}  # a block beyond the pool of the whole model
    member = first.split.member
    assert member is not None
    for keeper in (first, second):
        row = USED[-1] + 1 + keeper.split.member.region(0)  # type: ignore[union-attr]
        for layer in keeper.split.member.kept:  # type: ignore[union-attr]
            keeper.split.kv.write(layer, [row], first.had[layer][-1:] + 1.0)
    ended, _ = at_once(
        lambda: first.step(lambda model: model.restore(RestoreOrder(1, high, USED))), restoring(second)
    )
    assert ended == [SplitEvent.RESTORED] * 2 and second.has_all
    for kv, had in zip(first.kv(), first.had, strict=True):
        assert (kv[-1] == had[-1] + 1.0).all() and (kv[:-1] == had[:-1]).all()


def test_a_member_whose_restore_order_comes_late_loses_only_its_own_kv(four: Group) -> None:
    first, second = four[:2]
    split((first, second))
    second.split.limits = replace(LIMITS, order_s=0.3)
    ended, seconds = at_once(restoring(first))
    assert ended == [SplitEvent.RESTORED] and seconds < 2 and first.whole and first.has_all
    ended, _ = at_once(restoring(second))
    assert ended == [SplitEvent.LOST] and second.whole and second.has_its_parameters


def test_a_restore_waits_for_a_member_with_more_kv_to_fetch(four: Group) -> None:
    first, second = four[:2]
    split((first, second))
    for worker in (first, second):
        worker.split.limits = replace(LIMITS, meet_s=0.3, order_s=10.0)
    broken.break_with(first.model, "SlowToAnswer")
    first.model.service.slow_s = 2.0 / LAYERS  # type: ignore[attr-defined]
    ended, seconds = at_once(
        lambda: first.step(lambda model: model.restore(RestoreOrder(1, {}, []))), restoring(second)
    )
    assert ended == [SplitEvent.RESTORED] * 2 and seconds > 0.9
    assert second.has_all and second.whole and first.whole


def test_a_member_lost_during_a_restore_costs_kv_but_no_parameters(four: Group) -> None:
    first, second = four[:2]
    split((first, second))
    member = first.split.member
    assert member is not None
    for connection in member.connections.values():
        connection.close()
    ended, _ = at_once(restoring(first))
    assert ended == [SplitEvent.LOST] and first.split.lost
    assert first.whole and first.has_its_parameters


def test_a_batch_for_a_split_that_has_ended_is_refused(four: Group) -> None:
    split(four[:2])
    connection = PeerConnection(four[0].model.facts().address, SECRET, 5.0)
    at_once(*restores(four[:2]))
    values, tensors = a_batch()
    with pytest.raises(SplitEnded, match="epoch 1 is over here"):
        connection.request(Message(MessageKind.RUN, 1, values, tensors))
    connection.close()


class RestoringSide:
    """Scheduler side of a split engine that is told to restore."""

    def __init__(self) -> None:
        self.side: OverloadScheduler = scheduler_side("a:1", layers=4)
        self.engine = engine_with_a_pool()
        self.report(SplitEvent.SPLIT, BLOCKS + 8)

    def report(self, event: SplitEvent, blocks: int = BLOCKS) -> None:
        self.side.after_step(self.engine, SplitReport(event, 1, blocks))

    def order(self) -> object:
        self.side.between_steps(self.engine)
        return self.side.order(None)


@pytest.fixture
def restoring_side(monkeypatch: pytest.MonkeyPatch) -> RestoringSide:
    monkeypatch.setattr("workers.engine.compat.block_pool.shrink_pool", lambda scheduler, blocks: {9: 3})
    monkeypatch.setattr("workers.engine.compat.block_pool.used_blocks", lambda pool: ([1, 3], []))
    made = RestoringSide()
    assert made.side.inbox.restore(EngineCommand("restore", epoch=1)).done
    return made


def test_a_drop_command_is_refused_until_a_restore_has_ended(restoring_side: RestoringSide) -> None:
    side = restoring_side.side
    assert side.pending and restoring_side.order() == RestoreOrder(1, {9: 3}, [1, 3])
    drop = EngineCommand("drop", epoch=2, members=("a:1", "b:1"), part=0)
    assert "under way" in side.inbox.drop(drop).error
    restoring_side.report(SplitEvent.RESTORED)
    assert not side.pending and not side.kv_io_suspended and restoring_side.order() is None
    assert {name: len(seconds) for name, seconds in side.take_observations().items()} == {
        "drop_seconds": 1,
        "restore_seconds": 1,
    }
    assert side.take_counts() == {"splits.split": 1, "splits.restored": 1}


def test_a_restore_command_is_discarded_if_its_split_is_lost_first(
    restoring_side: RestoringSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.compat.block_pool.start_over", lambda scheduler, blocks: None)
    restoring_side.report(SplitEvent.LOST)
    assert not restoring_side.side.pending and restoring_side.order() is None


def later(seconds: float, step: Callable[[], SplitReport]) -> Callable[[], SplitReport]:
    def run() -> SplitReport:
        time.sleep(seconds)
        return step()

    return run


def test_a_member_that_comes_late_to_a_restore_still_gets_its_kv(four: Group) -> None:
    three = four[:3]
    split(three)
    steps = restores(three)
    ended, _ = at_once(later(0.5, steps[0]), steps[1], later(0.2, steps[2]))
    assert ended == [SplitEvent.RESTORED] * 3
    assert all(worker.whole and worker.has_all for worker in three)
