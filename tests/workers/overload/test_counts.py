"""What the peer costs, and what is forgotten for it, are counted once, under names that a page has."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from kvtransfer.config import ConnectorConfig
from kvtransfer.feed import FeedCommand
from kvtransfer.residence import Residence
from tests.workers.overload.workers_here import scheduler_side
from workers.overload.exchange import LinkOrder
from workers.overload.orders import (
    COUNTERS,
    DropOrder,
    NarrowOrder,
    RestoreOrder,
    SplitEvent,
    SplitReport,
    WorkerFacts,
)
from workers.overload.pipeline import SplitTally
from workers.overload.plugin import (
    EXCHANGE_S,
    LINK_BYTES_PER_S,
    LINK_SHOWN_S,
    OverloadScheduler,
    OverloadWorker,
)


def test_what_is_new_is_taken_once_and_under_known_names() -> None:
    context: Any = None
    worker, tally = OverloadWorker(context, 0), SplitTally()
    assert worker.take_counts() == {}  # there is no model yet
    link = LinkOrder()
    split: Any = SimpleNamespace(passes=SimpleNamespace(tally=tally), link=link)
    worker.split = split
    assert worker.take_counts() == {}
    tally.passes, tally.served, tally.peer_s, tally.peer_bytes = 3, 2, 0.5, 4096
    tally.idle_s, tally.served_s, link.beside_bytes, link.waits_s = 0.25, 0.75, 8192, 0.125
    first = worker.take_counts()
    assert sorted(first.values()) == [0.125, 0.25, 0.5, 0.75, 2, 3, 4096, 8192]
    for name in first:
        kind, _, value = name.partition(".")
        assert value in (COUNTERS[kind].values or ("",))
    tally.peer_s += 0.25
    assert worker.take_counts() == {"split_peer_seconds": 0.25}
    assert worker.take_counts() == {}


def test_plans_go_by_what_the_link_has_shown_until_that_is_long_ago() -> None:
    now = 0.0
    residence: Any = SimpleNamespace(clock=lambda: now, split=None, fenced=False)
    side = scheduler_side("a:1", 8, residence=residence)
    assert residence.split.shape.link_bytes_per_s == LINK_BYTES_PER_S
    side.after_step(None, SplitReport(SplitEvent.NOT_SPLIT, 0, 16, moved_bytes=4096, moved_s=1.0))
    assert residence.split.shape.link_bytes_per_s == LINK_BYTES_PER_S, "too little to say so"
    side.after_step(None, SplitReport(SplitEvent.NOT_SPLIT, 0, 16, moved_bytes=20 << 20, moved_s=2.0))
    assert residence.split.shape.link_bytes_per_s == 10 << 20
    assert side.take_counts()["split_exchanged_bytes"] == 4096 + (20 << 20)
    now = LINK_SHOWN_S - 1.0
    side.between_steps(None)
    assert residence.split.shape.link_bytes_per_s == 10 << 20
    now = LINK_SHOWN_S + 1.0
    side.between_steps(None)
    assert residence.split.shape.link_bytes_per_s == LINK_BYTES_PER_S, "a plan that it forbade is tried again"


class SideWithBlocks:
    """A scheduler's side on vLLM's own pool, of which the link takes so many blocks a second: requests hold
    two blocks, the prefix cache has ten."""

    def __init__(self, blocks_per_s: float) -> None:
        self.pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=16)
        self.blocks = self.pool.get_new_blocks(12)
        request: Any = SimpleNamespace(request_id="r", block_hashes=[BlockHash(b"%d" % n) for n in range(12)])
        self.pool.cache_full_blocks(request, self.blocks, 0, 12, 16, 0)
        self.held, self.cached = self.blocks[:2], self.blocks[2:]
        self.pool.free_blocks(self.cached)  # the last of them was used last
        self.residence = Residence(ConnectorConfig(), 0, lambda: 0.0)
        config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        context: Any = SimpleNamespace(residence=self.residence, commands={}, vllm_config=config)
        self.side = OverloadScheduler(context)
        self.side.bind(SimpleNamespace(block_pool=self.pool))
        facts = WorkerFacts("a:1", 8, 1_000, int(LINK_BYTES_PER_S / 8 / blocks_per_s), 64)
        self.told(SplitEvent.READY, epoch=0, facts=facts)

    def told(self, event: SplitEvent, epoch: int = 1, **more: Any) -> None:
        blocks = SimpleNamespace(num_gpu_blocks=32), SimpleNamespace(num_blocks=32)
        scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(block_pool=self.pool),
            cache_config=blocks[0],
            kv_cache_config=blocks[1],
        )
        self.side.after_step(scheduler, SplitReport(event, epoch, 32, **more))

    def ordered(self, command: str) -> Any:
        assert self.side.drop(FeedCommand(command, epoch=1, members=("a:1", "b:1"), part=0)).done
        return self.order()

    def order(self) -> Any:
        self.side.between_steps(None)
        return self.side.order(None)


def ids(*blocks: Any) -> list[int]:
    return sorted(block.block_id for block in blocks)


def test_what_the_link_would_take_too_long_for_is_forgotten_and_counted() -> None:
    """What requests hold is moved at once, and of the rest what was used last beside serving."""
    made = SideWithBlocks(5 / EXCHANGE_S)
    order = made.ordered("drop")
    assert isinstance(order, DropOrder)
    assert sorted(order.used) == ids(*made.held)
    assert order.cached == [block.block_id for block in reversed(made.cached[-5:])]
    assert [bool(block.block_hash) for block in made.blocks] == [True] * 2 + [False] * 5 + [True] * 5
    assert made.side.take_counts()["split_forgotten_blocks"] == 5 and "split_forgotten_blocks" in COUNTERS


def test_what_offline_requests_gave_back_goes_after_what_conversations_have() -> None:
    """Though it was used last."""
    made = SideWithBlocks(5 / EXCHANGE_S)
    conversations = made.residence.conversations
    for key, offline, numbers in (("c", False, range(2, 6)), ("offline:r", True, range(6, 12))):
        hashes = [BlockHash(b"%d" % number) for number in numbers]
        conversation = conversations.begin_turn(key, hashes, offline)
        conversations.advance(conversation, hashes)
    order = made.ordered("drop")
    assert sorted(order.cached) == ids(*made.cached[:4], made.cached[-1])


@pytest.fixture
def shrinks_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.overload.vllm_internals.shrink", lambda scheduler, blocks: {})


@pytest.mark.usefixtures("shrinks_by_nothing")
def test_what_has_not_gone_in_time_is_forgotten_and_a_restore_waits_for_that() -> None:
    made = SideWithBlocks(100.0)
    made.ordered("drop")
    made.told(SplitEvent.SPLIT)
    assert made.side.restore(FeedCommand("restore", epoch=1)).done
    assert made.order() is None and made.side.steps_anyway
    left = made.cached[:3]
    made.told(SplitEvent.GIVEN, rows=[block.block_id for block in left])
    assert [block for block in made.cached if block.block_hash is None] == left
    assert made.side.take_counts()["split_forgotten_blocks"] == 3
    assert isinstance(made.order(), NarrowOrder)


@pytest.mark.usefixtures("shrinks_by_nothing")
def test_what_came_home_and_is_as_it_was_is_not_taken_again() -> None:
    """Of the rest, what the link would take too long for is forgotten."""
    made = SideWithBlocks(6 / EXCHANGE_S)
    made.ordered("drop")
    made.told(SplitEvent.SPLIT)
    made.told(SplitEvent.GIVEN)
    assert made.side.restore(FeedCommand("restore", epoch=1)).done
    begun = made.order()
    kept = made.cached[-6:]
    assert isinstance(begun, NarrowOrder) and sorted(begun.cached) == ids(*kept)
    made.told(SplitEvent.NARROWED)
    request: Any = SimpleNamespace(request_id="s", block_hashes=[BlockHash(b"new %d" % n) for n in range(32)])
    new = made.pool.get_new_blocks(25)  # of the cached ones those that were used first
    made.pool.cache_full_blocks(request, new, 0, 25, 16, 0)
    again = [block for block in kept if block in new]
    assert 0 < len(again) < 6 and made.order() is None
    made.pool.free_blocks(new)
    come = [block for block in kept if block is not kept[-1]]
    made.told(SplitEvent.LOADED, rows=[block.block_id for block in come])
    ended = made.order()
    assert isinstance(ended, RestoreOrder)
    latest = [*new[::-1], kept[-1]]  # what is not at home, the latest first
    free = [block.block_id for block in made.pool.free_block_queue.get_all_free_blocks()]
    latest.sort(key=lambda block: free.index(block.block_id), reverse=True)
    assert sorted(ended.used) == ids(*made.held, *latest[:4])
