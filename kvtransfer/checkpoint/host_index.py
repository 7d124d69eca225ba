"""Index of host memory: which block is in which slot. It holds no bytes.

A slot is free, being stored to, or stored; a stored slot may have loads under way. When a block is dropped
while a copy touches its slot, the slot becomes free at the end of the copy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtransfer.retention.owned_blocks import HostCopy
from kvtransfer.retention.retained_conversations import RetainedConversations, block_key


@dataclass(slots=True)
class Slot:
    """Place of one block in host memory."""

    number: int
    generation: int  # of the slot's contents: a copy ordered for other contents is refused
    block: bytes
    stored: bool = False
    loads: int = 0  # copies back to the accelerator under way
    dropped: bool = False  # not in the index any more; free once no copy touches it

    @property
    def done(self) -> bool:
        return self.dropped and self.stored and not self.loads


class HostIndex:
    """Slots of host memory, by number and by the block that they hold."""

    def __init__(self, slots: int) -> None:
        self.capacity = slots
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[int, Slot] = {}
        self._by_block: dict[bytes, Slot] = {}
        self._generations = count(1)
        self.on_copy: Callable[[bytes, HostCopy], None] = lambda block, copy: None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Return the number of slots whose block can be found now or when its copy ends."""
        return len(self._by_block)

    @property
    def is_complete(self) -> bool:
        return len(self._free) + len(self._slots) == self.capacity

    def __contains__(self, block: bytes) -> bool:
        return block in self._by_block

    def stored(self, block: bytes) -> bool:
        slot = self._by_block.get(block)
        return slot is not None and slot.stored

    def stored_prefix(self, chain: list[bytes], start: int, end: int, group: int = 0) -> int:
        """Return how many blocks from `start` on are stored without a gap."""
        at = start
        while at < end and self.stored(block_key(chain[at], group)):
            at += 1
        return at - start

    def begin_store(self, block: bytes) -> Slot | None:
        """Reserve a slot to copy the block to, or return None if none is free."""
        if not self._free:
            return None
        slot = Slot(self._free.pop(), next(self._generations), block)
        self._slots[slot.number] = self._by_block[block] = slot
        self.on_copy(block, HostCopy.ON_ITS_WAY)
        return slot

    def end_store(self, number: int) -> None:
        slot = self._slots[number]
        slot.stored = True
        if not slot.dropped:
            self.on_copy(slot.block, HostCopy.STORED)
        self._free_if_done(slot)

    def begin_load(self, block: bytes) -> Slot | None:
        """Protect the block's slot until `end_load`; None if the block was dropped meanwhile."""
        slot = self._by_block.get(block)
        if slot is not None:
            slot.loads += 1
        return slot

    def end_load(self, number: int) -> None:
        slot = self._slots[number]
        slot.loads -= 1
        self._free_if_done(slot)

    def drop(self, block: bytes) -> None:
        """Remove a block that is no longer wanted or was found to be corrupt."""
        slot = self._by_block.pop(block, None)
        if slot is not None:
            slot.dropped = True
            self.on_copy(block, HostCopy.ABSENT)
            self._free_if_done(slot)

    def drop_slot(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is not None and not slot.dropped:
            self.drop(slot.block)

    def blocks(self) -> list[bytes]:
        return list(self._by_block)

    def faults(self) -> list[str]:
        """Describe inconsistencies; an index without leaks has none."""
        found = [f"slot {s.number} is dropped, idle, and not free" for s in self._slots.values() if s.done]
        if not self.is_complete:
            found.append(f"{self.capacity} slots, but {len(self._free)} free and {len(self._slots)} used")
        states = Counter(slot.block for slot in self._slots.values() if not slot.dropped)
        found += [f"a block is in {slots} slots" for slots in states.values() if slots > 1]
        return found

    def _free_if_done(self, slot: Slot) -> None:
        if slot.done:
            del self._slots[slot.number]
            self._free.append(slot.number)


def block_faults(
    blocks: Sequence[Any], free_blocks: int, references: Mapping[str, Iterable[int]]
) -> list[str]:
    """Describe blocks whose reference count differs from what the holders account for.

    `references` has the block ids by holder, one for each reference.
    """
    held: Counter[int] = Counter()
    for ids in references.values():
        held.update(ids)
    found = [
        f"block {block.block_id} has {block.ref_cnt} references, {held[block.block_id]} of them accounted for"
        for block in blocks
        if not block.is_null and block.ref_cnt != held[block.block_id]
    ]
    free = sum(1 for block in blocks if not block.is_null and block.ref_cnt == 0)
    if free != free_blocks:
        found.append(f"{free} blocks have no reference, but {free_blocks} are in the free queue")
    return found


def host_faults(host: HostIndex, conversations: RetainedConversations) -> list[str]:
    """Describe inconsistencies of host memory, including blocks without an owner."""
    orphans = [block for block in host.blocks() if not conversations.wanted_on_host(block)]
    return host.faults() + ([f"{len(orphans)} host slots belong to nobody"] if orphans else [])
