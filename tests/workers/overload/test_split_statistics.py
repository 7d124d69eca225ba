"""A split's counts are reported, its link is measured, and a drop chooses the blocks that it moves."""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from kvtransfer.compat.free_queue import take_owned_blocks_last
from kvtransfer.config import ConnectorConfig
from kvtransfer.control.control_socket import EngineCommand
from kvtransfer.retention.parking import SharedKvState
from tests.workers.overload.workers_here import scheduler_side
from workers.engine.overload.metrics import COUNTERS, DEFAULT_LINK_BYTES_PER_S, MEASUREMENT_VALID_S
from workers.engine.overload.orders import DropOrder, SplitEvent, SplitReport, WorkerFacts
from workers.engine.overload.plugin import CACHED_KV_S, OverloadScheduler, OverloadWorker
from workers.engine.overload.split.passes import PassCounts


def test_worker_counts_are_reported_once_under_known_names() -> None:
    context: Any = None
    worker, counts = OverloadWorker(context, 0), PassCounts()
    assert worker.take_counts() == {}  # there is no model yet
    model: Any = SimpleNamespace(passes=SimpleNamespace(counts=counts))
    worker.model = model
    assert worker.take_counts() == {}
    counts.own, counts.served, counts.peer_s, counts.peer_bytes = 3, 2, 0.5, 4096
    counts.idle_s, counts.served_s = 0.25, 0.75
    first = worker.take_counts()
    assert sorted(first.values()) == [0.25, 0.5, 0.75, 2, 3, 4096]
    for name in first:
        kind, _, value = name.partition(".")
        assert value in (COUNTERS[kind].values or ("",))
    counts.peer_s += 0.25
    assert worker.take_counts() == {"split_peer_seconds": 0.25}
    assert worker.take_counts() == {}


def test_a_measured_link_is_used_until_it_is_too_old() -> None:
    now = 0.0
    kv_state: Any = SimpleNamespace(clock=lambda: now, split=None, kv_io_suspended=False)
    side = scheduler_side("a:1", 8, kv_state=kv_state)
    assert kv_state.split.shape.link_bytes_per_s == DEFAULT_LINK_BYTES_PER_S
    side.after_step(None, SplitReport(SplitEvent.NOT_SPLIT, 0, 16, moved_bytes=4096, moved_s=1.0))
    assert kv_state.split.shape.link_bytes_per_s == DEFAULT_LINK_BYTES_PER_S, "too little to say so"
    side.after_step(None, SplitReport(SplitEvent.NOT_SPLIT, 0, 16, moved_bytes=20 << 20, moved_s=2.0))
    assert kv_state.split.shape.link_bytes_per_s == 10 << 20
    assert side.take_counts()["split_exchanged_bytes"] == 4096 + (20 << 20)
    now = MEASUREMENT_VALID_S - 1.0
    side.between_steps(None)
    assert kv_state.split.shape.link_bytes_per_s == 10 << 20
    now = MEASUREMENT_VALID_S + 1.0
    side.between_steps(None)
    assert kv_state.split.shape.link_bytes_per_s == DEFAULT_LINK_BYTES_PER_S, (
        "a plan that it forbade is tried again"
    )


class SideWithBlocks:
    """Scheduler side on vLLM's own pool: requests hold two blocks, the prefix cache ten."""

    def __init__(self, blocks_per_s: float, owners: Mapping[str, range] = MappingProxyType({})) -> None:
        """Fill the pool. `owners` maps conversations and offline requests to the numbers of their blocks."""
        self.kv_state = SharedKvState(ConnectorConfig(), 0, lambda: 0.0)
        self.pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=16)
        self.blocks = self.pool.get_new_blocks(12)
        request: Any = SimpleNamespace(request_id="r", block_hashes=[BlockHash(b"%d" % n) for n in range(12)])
        self.pool.cache_full_blocks(request, self.blocks, 0, 12, 16, 0)
        self.held, self.cached = self.blocks[:2], self.blocks[2:]
        conversations = self.kv_state.conversations
        take_owned_blocks_last(self.pool, conversations.blocks, self.kv_state.lock)
        for key, numbers in owners.items():
            hashes = [BlockHash(b"%d" % number) for number in numbers]
            owner = conversations.begin_turn(key, hashes, key.startswith("offline:"))
            conversations.advance(owner, hashes)
        self.pool.free_blocks(self.cached)  # the last block counts as used last
        config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        context: Any = SimpleNamespace(kv_state=self.kv_state, commands={}, vllm_config=config)
        self.side = OverloadScheduler(context)
        self.side.bind(SimpleNamespace(block_pool=self.pool))
        facts = WorkerFacts("a:1", 8, 1_000, int(DEFAULT_LINK_BYTES_PER_S / 8 / blocks_per_s), 64)
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
        assert self.side.inbox.drop(EngineCommand(command, epoch=1, members=("a:1", "b:1"), part=0)).done
        return self.order()

    def order(self) -> Any:
        self.side.between_steps(None)
        return self.side.order(None)


def ids(*blocks: Any) -> list[int]:
    return sorted(block.block_id for block in blocks)


def test_a_drop_moves_cached_blocks_for_a_limited_time_and_evicts_the_rest() -> None:
    """Blocks of requests always move, but only the most recently used of the cached blocks do."""
    made = SideWithBlocks(5 / CACHED_KV_S)
    order = made.ordered("drop")
    assert isinstance(order, DropOrder)
    assert sorted(order.used[:2]) == ids(*made.held)
    assert order.used[2:] == [block.block_id for block in reversed(made.cached[-5:])]
    assert [bool(block.block_hash) for block in made.blocks] == [True] * 2 + [False] * 5 + [True] * 5
    assert made.side.take_counts()["split_forgotten_blocks"] == 5 and "split_forgotten_blocks" in COUNTERS


def test_cached_blocks_of_offline_requests_are_evicted_first() -> None:
    """Offline requests' blocks are evicted first, the last block before the others, even if used last."""
    made = SideWithBlocks(5 / CACHED_KV_S, {"c": range(2, 6), "offline:r": range(6, 12)})
    order = made.ordered("drop")
    assert sorted(order.used[2:]) == ids(*made.cached[:5])
