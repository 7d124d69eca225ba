"""What the peer costs, and what is forgotten for it, are counted once, under names that a page has."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from kvtransfer.feed import FeedCommand
from tests.workers.overload.workers_here import scheduler_side
from workers.overload.metrics import COUNTERS, SplitEvent
from workers.overload.orders import DropOrder, SplitReport, WorkerFacts
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
    split: Any = SimpleNamespace(passes=SimpleNamespace(tally=tally))
    worker.split = split
    assert worker.take_counts() == {}
    tally.passes, tally.served, tally.peer_s, tally.peer_bytes = 3, 2, 0.5, 4096
    tally.idle_s, tally.served_s = 0.25, 0.75
    first = worker.take_counts()
    assert sorted(first.values()) == [0.25, 0.5, 0.75, 2, 3, 4096]
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


def test_what_the_link_would_take_too_long_for_is_forgotten_and_counted() -> None:
    """On vLLM's own pool: what requests hold is moved, and of the rest what was used last."""
    pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=16)
    blocks = pool.get_new_blocks(12)
    request: Any = SimpleNamespace(request_id="r", block_hashes=[BlockHash(b"%d" % n) for n in range(12)])
    pool.cache_full_blocks(request, blocks, 0, 12, 16, 0)
    held, cached = blocks[:2], blocks[2:]
    pool.free_blocks(cached)  # the last of them was used last
    residence = SimpleNamespace(clock=lambda: 0.0, split=None, fenced=False, at_rest=True)
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
    context: Any = SimpleNamespace(residence=residence, commands={}, vllm_config=config)
    side = OverloadScheduler(context)
    side.bind(SimpleNamespace(block_pool=pool))
    row_bytes = int(EXCHANGE_S * LINK_BYTES_PER_S / 8 / 5)  # five blocks of eight layers
    facts = WorkerFacts("a:1", 8, 1_000, row_bytes, 64)
    side.after_step(None, SplitReport(SplitEvent.READY, 0, 32, facts=facts))
    assert side.drop(FeedCommand("drop", epoch=1, members=("a:1", "b:1"), part=0)).done
    side.between_steps(None)
    order = side.order(None)
    assert isinstance(order, DropOrder)
    assert sorted(order.used) == sorted(block.block_id for block in (*held, *cached[-3:]))
    assert [bool(block.block_hash) for block in blocks] == [True] * 2 + [False] * 7 + [True] * 3
    assert side.take_counts()["split_forgotten_blocks"] == 7 and "split_forgotten_blocks" in COUNTERS
