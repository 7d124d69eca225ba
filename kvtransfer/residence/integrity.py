"""Every block is free, running, or held for a stated reason; every host slot is free or somebody's."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from kvtransfer.residence.conversations import Conversations
from kvtransfer.residence.host_index import HostIndex


class Block(Protocol):
    @property
    def block_id(self) -> int: ...
    @property
    def ref_cnt(self) -> int: ...
    @property
    def is_null(self) -> bool: ...


def block_faults(
    blocks: Sequence[Block], free_blocks: int, references: Mapping[str, Iterable[int]]
) -> list[str]:
    """References no holder accounts for, and the other way round. `references`: block ids by holder."""
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


def host_faults(host: HostIndex, conversations: Conversations) -> list[str]:
    orphans = [block for block in host.blocks() if not conversations.wanted_on_host(block)]
    return host.faults() + ([f"{len(orphans)} host slots belong to nobody"] if orphans else [])
