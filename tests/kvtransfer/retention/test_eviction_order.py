"""Free blocks are evicted in the order of their owners' ranks, as a visit of all blocks computes it."""

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from vllm.v1.core.block_pool import BlockPool

from kvtransfer.compat.block_cache import cache_blocks
from kvtransfer.compat.free_queue import key_of, take_owned_blocks_last
from kvtransfer.retention.retained_conversations import (
    RetainedConversation,
    RetainedConversations,
    RetentionPhase,
    all_kept,
)
from tests.support.clock import Clock

BLOCKS, TOKENS = 50, 16


def eviction_order(
    conversations: RetainedConversations, shared: list[bytes], free: Callable[[bytes], Any | None]
) -> list[Any]:
    """Return the free blocks with an owner in eviction order, found by a visit of all blocks."""
    order: list[Any] = []
    last = [block for key in shared if (block := free(key)) is not None]
    placed = set(map(id, last))
    # Filled from the end, so that a block shared by a turn and an offline request has the turn's place.
    for conversation in sorted(conversations, key=_retention_order, reverse=True):
        for key in conversations.keys(conversation):
            block = free(key)
            if block is not None and id(block) not in placed:
                placed.add(id(block))
                order.append(block)
    order.reverse()
    return order + last


def _retention_order(conversation: RetainedConversation) -> tuple[Any, ...]:
    return conversation.rank, conversation.phase is RetentionPhase.RUNNING, conversation.used_at


def windowed(blocks: int) -> int:
    """Return the index of the first of `blocks` blocks that a window of two blocks covers."""
    return max(0, blocks - 2)


class Histories:
    """Random turns, offline requests and requests without an owner, on a real block pool."""

    def __init__(self, seed: int, groups: int) -> None:
        self._random = random.Random(seed)
        self.clock = Clock()
        kept = (all_kept, windowed)[:groups]
        self.conversations = RetainedConversations(self.clock, lambda block: None, kept)
        self._kept = kept
        self.pool = BlockPool(BLOCKS, True, TOKENS)
        take_owned_blocks_last(self.pool, self.conversations.blocks, threading.RLock())
        self._running: list[tuple[RetainedConversation | None, list[Any]]] = []
        self._chains: dict[str, list[bytes]] = {}
        self._names = iter(range(1_000_000))
        self._shared: dict[bytes, None] = {}  # in the order in which turns used them
        self._owners: dict[bytes, set[str]] = {}

    def act(self) -> None:
        self.clock.now += 1
        if self._running and (self._random.random() < 0.45 or self.pool.get_num_free_blocks() < 22):
            self._end()
        else:
            self._random.choice((self._turn, self._turn, self._turn, self._offline, self._stranger))()
        idle = [one for one in self.conversations if not one.turns]
        if idle:
            one = self._random.choice(idle)
            self._random.choice(
                (
                    lambda: self.conversations.park(one),
                    lambda: self.conversations.leave_host(one),
                    lambda: self.conversations.end(one.key),
                    lambda: self.conversations.prefetched(one.key, one.last_used, self._random.random()),
                    lambda: None,
                )
            )()

    def _new_chain(self, before: list[bytes]) -> list[bytes]:
        return [*before, *(b"%05d" % next(self._names) for _ in range(self._random.randint(1, 5)))]

    def _turn(self) -> None:
        running = {one.key for one, _ in self._running if one is not None}
        if not (idle := [key for key in "abcdefgh" if key not in running]):
            return
        key = self._random.choice(idle)
        chain = self._chains.get(key, [])
        if self._random.random() < 0.3 and self._chains:  # a fork of another conversation
            chain = self._random.choice(list(self._chains.values()))
        chain = chain[: self._random.randint(len(chain) // 2, len(chain))][:9]
        self._chains[key] = self._new_chain(chain)
        self._begin(self.conversations.begin_turn(key, self._chains[key]), self._chains[key])

    def _offline(self) -> None:
        before = self._random.choice([[], *self._chains.values()])[:4]
        chain = self._new_chain(before)
        self._begin(self.conversations.begin_turn(f"offline{next(self._names)}", chain, True), chain)

    def _stranger(self) -> None:
        self._begin(None, self._new_chain([]))

    def _begin(self, conversation: RetainedConversation | None, chain: list[bytes]) -> None:
        """Begin a request: take the cached blocks of its chain's beginning, and new ones for the rest."""
        held: list[Any] = []
        for group, first in enumerate(self._kept):
            found: list[Any] = []
            for block_hash in chain[first(len(chain)) :]:
                cached = self.pool.get_cached_block(block_hash, [group])
                if not cached:
                    break
                found += cached
            self.pool.touch(found)
            held.append((group, first(len(chain)), found))
        for group, first, found in held:
            new = self.pool.get_new_blocks(len(chain) - first - len(found))
            start = first + len(found)
            fresh = {start + at: block for at, block in enumerate(new)}
            cache_blocks(self.pool, chain, fresh, TOKENS, group)
            found += new
        if conversation is not None:
            self.conversations.advance(conversation, chain)
        self._running.append((conversation, [block for _, _, found in held for block in reversed(found)]))

    def _end(self) -> None:
        conversation, blocks = self._running.pop(self._random.randrange(len(self._running)))
        if conversation is not None:
            self._use_shared(conversation)
            self.conversations.end_turn(conversation)
        self.pool.free_blocks(blocks)

    def _use_shared(self, conversation: RetainedConversation) -> None:
        for key in reversed(list(self.conversations.keys(conversation))):
            self._shared.pop(key, None)
            self._shared[key] = None

    def shared(self) -> list[bytes]:
        owners: dict[bytes, int] = {}
        for one in self.conversations:
            for key in self.conversations.keys(one) if not one.offline else ():
                owners[key] = owners.get(key, 0) + 1
        return [key for key in self._shared if owners.get(key, 0) > 1]

    def queue(self) -> list[Any]:
        return list(self.pool.free_block_queue.get_all_free_blocks())

    def expected(self) -> Iterator[Any]:
        blocks = self.queue()
        by_key: dict[bytes | None, Any] = {key_of(block): block for block in blocks}
        owned = eviction_order(self.conversations, self.shared(), by_key.get)
        of_owners = set(map(id, owned))
        yield from (block for block in blocks if id(block) not in of_owners)
        yield from owned


@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_are_evicted_in_the_order_that_a_visit_of_all_blocks_finds(groups: int) -> None:
    compared = evicted = 0
    for seed in range(40):
        made = Histories(seed, groups)
        for _ in range(60):
            made.act()
            expected = [block.block_id for block in made.expected()]
            assert [block.block_id for block in made.queue()] == expected, seed
            compared += 1
        left = made.pool.get_num_free_blocks()
        assert [block.block_id for block in made.pool.get_new_blocks(left)] == expected
        evicted += left
    assert compared == 2400 and evicted > 800
