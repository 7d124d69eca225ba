"""Index of host memory and of the disk behind it: which block is in which slot. It holds no bytes.

A slot is free, being stored to, or stored; a stored slot may have loads under way. When a block is dropped
while a copy touches its slot, the slot becomes free at the end of the copy. Blocks are stored to slots in
memory; a move to a slot on the disk frees the one in memory when it ends.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtransfer.checkpoint.copy_orders import FIRST_DISK_SLOT, DiskMove
from kvtransfer.retention.owned_blocks import HostCopy
from kvtransfer.retention.retained_conversations import CacheGroup, RetainedConversations, block_key


@dataclass(slots=True)
class Slot:
    """Place of one block in host memory or on the disk."""

    number: int
    generation: int  # generation of the slot's contents: a copy ordered for other contents is refused
    block: bytes
    stored: bool = False
    loads: int = 0  # copies back to the accelerator under way
    dropped: bool = False  # not in the index any more; free once no copy touches it

    @property
    def done(self) -> bool:
        return self.dropped and self.stored and not self.loads

    @property
    def on_disk(self) -> bool:
        return self.number >= FIRST_DISK_SLOT


class HostIndex:
    """Slots of host memory and of the disk, by number and by the block that they hold."""

    def __init__(self, slots: int, disk_slots: int = 0) -> None:
        self.capacity = slots
        self.disk_capacity = disk_slots
        self._free = list(range(slots - 1, -1, -1))
        self._free_on_disk = list(range(FIRST_DISK_SLOT + disk_slots - 1, FIRST_DISK_SLOT - 1, -1))
        self._slots: dict[int, Slot] = {}
        self._by_block: dict[bytes, Slot] = {}
        self._moving: dict[int, Slot] = {}  # slot on the disk -> slot whose block moves there
        self._on_disk = 0  # number of blocks in `_by_block` that are on the disk
        self._generations = count(1)
        self.on_copy: Callable[[bytes, HostCopy], None] = lambda block, copy: None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Return the number of blocks that are in host memory or being copied to it, without dropped ones."""
        return len(self._by_block) - self._on_disk

    @property
    def free_on_disk(self) -> int:
        return len(self._free_on_disk)

    @property
    def used_on_disk(self) -> int:
        """Return the number of blocks that are on the disk and no longer in host memory."""
        return self._on_disk

    @property
    def moving(self) -> int:
        """Return the number of moves to the disk that have not ended."""
        return len(self._moving)

    @property
    def is_complete(self) -> bool:
        free = len(self._free) + len(self._free_on_disk)
        return free + len(self._slots) == self.capacity + self.disk_capacity

    def __contains__(self, block: bytes) -> bool:
        return block in self._by_block

    def stored(self, block: bytes) -> bool:
        slot = self._by_block.get(block)
        return slot is not None and slot.stored

    def on_disk(self, block: bytes) -> bool:
        slot = self._by_block.get(block)
        return slot is not None and slot.on_disk

    def restorable_end(
        self, groups: Sequence[CacheGroup], chain: Sequence[bytes], start: int, end: int, pool: Any = None
    ) -> int:
        """Return the end of the longest run of `chain` from `start` to at most `end` that can be restored.

        A block can be restored if it is stored on the host or cached in `pool`. Groups with a window need
        only the blocks of the window at the end of the run.
        """

        def lacks(at: int, group: int) -> bool:
            cached = pool is not None and pool.get_cached_block(chain[at], [group]) is not None
            return not (cached or self.stored(block_key(chain[at], group)))

        for number, group in enumerate(groups):
            if not group.window:
                end = next((at for at in range(start, end) if lacks(at, number)), end)
        windows = [(number, group) for number, group in enumerate(groups) if group.window]
        while end > start:
            needed = ((n, reversed(range(max(start, group.first_kept(end)), end))) for n, group in windows)
            gap = max((next((at for at in places if lacks(at, n)), -1) for n, places in needed), default=-1)
            if gap < 0:
                break
            end = gap
        return end

    def begin_store(self, block: bytes) -> Slot | None:
        """Reserve a slot to copy the block to, and return it; return None if no slot is free."""
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
        """Protect the block's slot until `end_load`, and return it; return None if the block was dropped."""
        slot = self._by_block.get(block)
        if slot is not None:
            slot.loads += 1
        return slot

    def end_load(self, number: int) -> None:
        slot = self._slots[number]
        slot.loads -= 1
        self._free_if_done(slot)

    def begin_move(self, block: bytes) -> DiskMove | None:
        """Return a move of a block to a reserved disk slot.

        Returns None if the block is not in memory, a copy uses it, or the disk is full.
        """
        slot = self._by_block.get(block)
        if slot is None or slot.on_disk or not slot.stored or slot.loads or not self._free_on_disk:
            return None
        slot.loads = 1  # the move reads the slot
        target = Slot(self._free_on_disk.pop(), next(self._generations), block, dropped=True)
        self._slots[target.number], self._moving[target.number] = target, slot
        return DiskMove(slot.number, slot.generation, target.number, target.generation)

    def end_move(self, number: int, written: bool) -> None:
        """End the move to a disk slot. The block stays in memory if it was not `written`."""
        target, source = self._slots[number], self._moving.pop(number)
        target.stored = True
        if written and not source.dropped:
            target.dropped, source.dropped = False, True
            self._by_block[target.block] = target
            self._on_disk += 1
        self.end_load(source.number)
        self._free_if_done(target)

    def drop(self, block: bytes) -> None:
        """Remove a block that is no longer wanted or was found to be corrupt."""
        slot = self._by_block.pop(block, None)
        if slot is not None:
            self._on_disk -= slot.on_disk
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
        """Return a sentence for each inconsistency of the index, such as a leaked slot."""
        found = [f"slot {s.number} is dropped, idle, and not free" for s in self._slots.values() if s.done]
        if not self.is_complete:
            slots, free = self.capacity + self.disk_capacity, len(self._free) + len(self._free_on_disk)
            found.append(f"{slots} slots, but {free} free and {len(self._slots)} used")
        on_disk = sum(slot.on_disk for slot in self._by_block.values())
        if self._on_disk != on_disk:
            found.append(f"{on_disk} blocks are on the disk, and {self._on_disk} are counted")
        states = Counter(slot.block for slot in self._slots.values() if not slot.dropped)
        found += [f"a block is in {slots} slots" for slots in states.values() if slots > 1]
        return found

    def _free_if_done(self, slot: Slot) -> None:
        if slot.done:
            del self._slots[slot.number]
            (self._free_on_disk if slot.on_disk else self._free).append(slot.number)


def block_faults(
    blocks: Sequence[Any], free_blocks: int, references: Mapping[str, Iterable[int]]
) -> list[str]:
    """Return a sentence for each block whose reference count differs from what its holders state.

    `references` has, for each holder, one block id for each reference that the holder has.
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
    """Return a sentence for each inconsistency of host memory, including blocks without an owner."""
    orphans = [block for block in host.blocks() if not conversations.wanted_on_host(block)]
    return host.faults() + ([f"{len(orphans)} host slots belong to nobody"] if orphans else [])
