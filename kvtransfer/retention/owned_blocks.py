"""Blocks that conversations own: owners, host copies, and the eviction order of those without references.

Each conversation has a list of its free blocks. One more list has the free blocks that several conversations
share. Eviction takes blocks from the first list in eviction order, and of a conversation the last block
first. When the rank of a conversation changes, its list moves as a whole, so no block is visited.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any, Protocol

STALE_ENTRIES = 64  # entries of removed blocks that a heap may have, beyond one for each block of the list


class EvictionRank(IntEnum):
    """Rank of a block without references, by its owner; the lowest rank is evicted first."""

    NOTHING = 0
    OFFLINE = 1
    PARKED = 2
    RETAINED = 3
    SHARED = 4  # prefix of several conversations


class HostCopy(IntEnum):
    """State of a block's copy on the host."""

    ABSENT = 0
    ON_ITS_WAY = 1
    STORED = 2


ABSENT, STORED = HostCopy.ABSENT, HostCopy.STORED
BlockKey = tuple[bytes, int]  # key of a block, and its place: the same in every chain that has the block
EvictionOrder = tuple[EvictionRank, bool, float]  # an owner's rank, whether its turn runs, when it was used
LAST = (EvictionRank.SHARED, False, inf)


class EvictionList:
    """Free blocks, of which the one with the lowest key is evicted first."""

    __slots__ = ("_heap", "_keys", "order", "stored")

    def __init__(self, order: EvictionOrder = LAST) -> None:
        self.order = order  # place among the lists
        self.stored = 0  # blocks of the list with a copy on the host
        self._keys: dict[int, tuple[tuple[int, int], Any]] = {}
        self._heap: list[tuple[tuple[int, int], int]] = []  # key and block id, also of removed blocks

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return (block for _, block in sorted(self._keys.values(), key=lambda entry: entry[0]))

    def add(self, block: Any, key: tuple[int, int]) -> None:
        if len(self._heap) > 2 * len(self._keys) + STALE_ENTRIES:
            self._heap = [(found, number) for number, (found, _) in self._keys.items()]
            heapify(self._heap)
        self._keys[block.block_id] = key, block
        heappush(self._heap, (key, block.block_id))

    def remove(self, block: Any) -> None:
        del self._keys[block.block_id]
        if not self._keys:
            self._heap.clear()

    def first(self) -> Any:
        """Return the block that is evicted first."""
        while True:
            key, number = self._heap[0]
            found = self._keys.get(number)
            if found is not None and found[0] == key:
                return found[1]
            heappop(self._heap)


class BlockOwner(Protocol):
    """Conversation or offline request whose blocks `OwnedBlocks` counts."""

    offline: bool
    on_host: bool
    free: EvictionList
    owned: int
    exclusive: int  # blocks that no other conversation owns; offline work does not count
    lacking: int  # blocks with no copy on the host, and none on its way there
    unstored: int  # blocks with no complete copy on the host

    @property
    def used_at(self) -> float: ...


@dataclass(slots=True, eq=False)
class OwnedBlock:
    """Owners of a block, and where its KV is."""

    place: int
    turns: tuple[Any, ...] = ()  # owners that are conversations
    offline: tuple[Any, ...] = ()  # owners that are offline requests
    host: HostCopy = ABSENT
    shared_use: int = 0  # number of the turn that used it last, if several conversations own it
    free: list[Any] = field(default_factory=list)  # blocks of the pool that hold it without references

    @property
    def wanted_on_host(self) -> bool:
        return any(owner.on_host for owner in self.turns) or any(owner.on_host for owner in self.offline)


class OwnedBlocks:
    """Owners of blocks, by block key. The counts of each owner are kept up to date with every change."""

    def __init__(self, on_unwanted: Callable[[bytes], None]) -> None:
        self._on_unwanted = on_unwanted  # called for a block that no owner wants on the host any more
        # Called for a free block that loses its last owner.
        self.on_unowned: Callable[[Any], None] = lambda block: None
        self._blocks: dict[bytes, OwnedBlock] = {}
        self._lists: dict[int, tuple[OwnedBlock, EvictionList]] = {}  # by id of each free block
        self._filled: set[EvictionList] = set()  # lists with blocks
        self._next: EvictionList | None = None  # the one of them to evict from next, if known
        self._uses = count(1)
        self.host_copies = 0  # blocks with a copy on the host, or on its way there
        self.shared = EvictionList()
        self.free = [0] * len(EvictionRank)  # number of free blocks by rank

    def __len__(self) -> int:
        return len(self._blocks)

    def rank_of(self, key: bytes) -> EvictionRank:
        block = self._blocks.get(key)
        return self._list_of(block).order[0] if block is not None else EvictionRank.NOTHING

    def wanted_on_host(self, key: bytes) -> bool:
        block = self._blocks.get(key)
        return block is not None and block.wanted_on_host

    # Changes of owners

    def gain(self, owner: BlockOwner, keys: Iterable[BlockKey]) -> None:
        use = next(self._uses)
        for key, place in keys:
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = OwnedBlock(place)
            free = self._remove_free(block) if block.free else ()
            if owner.offline:
                block.offline += (owner,)
            elif not block.turns:
                block.turns = (owner,)
                owner.exclusive += 1
            else:
                if len(block.turns) == 1:
                    block.turns[0].exclusive -= 1
                    block.shared_use = use
                block.turns += (owner,)
            owner.owned += 1
            owner.lacking += block.host is ABSENT
            owner.unstored += block.host is not STORED
            self._add_free(block, *free)

    def lose(self, owner: BlockOwner, keys: Sequence[BlockKey]) -> None:
        for key, _ in reversed(keys):  # the last block of a chain is evicted first
            block = self._blocks[key]
            free = self._remove_free(block) if block.free else ()
            owner.owned -= 1
            owner.lacking -= block.host is ABSENT
            owner.unstored -= block.host is not STORED
            if owner.offline:
                block.offline = tuple(one for one in block.offline if one is not owner)
            else:
                block.turns = tuple(one for one in block.turns if one is not owner)
                owner.exclusive -= not block.turns
                if len(block.turns) == 1:
                    block.turns[0].exclusive += 1
            if owner.on_host and not block.wanted_on_host:
                self._on_unwanted(key)
            if block.turns or block.offline:
                self._add_free(block, *free)
                continue
            del self._blocks[key]
            self.host_copies -= block.host is not ABSENT
            for one in free:
                self.on_unowned(one)

    def leave_host(self, keys: Iterable[bytes]) -> None:
        """Drop the host copies of those blocks of `keys` that no owner wants on the host any more."""
        for key in keys:
            if not self._blocks[key].wanted_on_host:
                self._on_unwanted(key)

    def on_host_copy(self, key: bytes, copy: HostCopy) -> None:
        """Record the new state of a block's copy on the host."""
        block = self._blocks.get(key)
        if block is None:
            return
        lacking = (copy is ABSENT) - (block.host is ABSENT)
        stored = (copy is STORED) - (block.host is STORED)
        block.host = copy
        self.host_copies -= lacking
        for owner in block.turns + block.offline:
            owner.lacking += lacking
            owner.unstored -= stored
        for one in block.free:
            self._lists[one.block_id][1].stored += stored

    def shared_used(self, owner: BlockOwner, keys: Iterable[bytes]) -> None:
        """Rank the shared blocks of a conversation whose turn has ended as the most recently used ones."""
        left, use = owner.owned - owner.exclusive, next(self._uses)
        for key in keys if left else ():
            block = self._blocks[key]
            if len(block.turns) > 1:
                free = self._remove_free(block) if block.free else ()
                block.shared_use = use
                self._add_free(block, *free)
                left -= 1
                if not left:
                    return

    def reorder(self, blocks: EvictionList, order: EvictionOrder) -> None:
        """Move all blocks of one list to another place in the eviction order."""
        if order != blocks.order:
            self.free[blocks.order[0]] -= len(blocks)
            self.free[order[0]] += len(blocks)
            blocks.order = order
            self._next = None

    # Blocks of the pool that have no reference

    def release(self, key: bytes, pool_block: Any) -> bool:
        """Add a pool block without references to the eviction order; return False if it has no owner."""
        block = self._blocks.get(key)
        if block is None:
            return False
        self._add_free(block, pool_block)
        return True

    def reclaim(self, pool_block: Any) -> bool:
        """Take a pool block out of the eviction order, to use it; return False if it had no place there."""
        found = self._lists.pop(pool_block.block_id, None)
        if found is None:
            return False
        block, blocks = found
        block.free.remove(pool_block)
        blocks.remove(pool_block)
        blocks.stored -= block.host is STORED
        self.free[blocks.order[0]] -= 1
        if not blocks:
            self._filled.discard(blocks)
            self._next = None
        return True

    def evict(self, number: int) -> list[Any]:
        """Remove the first `number` blocks from the eviction order, and return them."""
        evicted = []
        for _ in range(number):
            if self._next is None:
                self._next = min(self._filled, key=lambda blocks: blocks.order)
            evicted.append(self._next.first())
            self.reclaim(evicted[-1])
        return evicted

    def in_eviction_order(self) -> Iterator[Any]:
        for blocks in sorted(self._filled, key=lambda blocks: blocks.order):
            yield from blocks

    @property
    def released(self) -> int:
        return len(self._lists)

    def _list_of(self, block: OwnedBlock) -> EvictionList:
        if len(block.turns) > 1:
            return self.shared
        found: EvictionList = (block.turns or (max(block.offline, key=lambda one: one.used_at),))[0].free
        return found

    def _add_free(self, block: OwnedBlock, *free: Any) -> None:
        turns = block.turns
        blocks: EvictionList = turns[0].free if len(turns) == 1 else self._list_of(block)
        for one in free:
            if not blocks:
                self._filled.add(blocks)
                self._next = None
            blocks.add(one, (block.shared_use if len(turns) > 1 else 0, -block.place))
            blocks.stored += block.host is STORED
            block.free.append(one)
            self._lists[one.block_id] = block, blocks
            self.free[blocks.order[0]] += 1

    def _remove_free(self, block: OwnedBlock) -> tuple[Any, ...]:
        free = tuple(block.free)
        for one in free:
            self.reclaim(one)
        return free
