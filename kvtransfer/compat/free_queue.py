"""vLLM's queue of free blocks, replaced by one that takes the blocks of conversations last."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, make_block_hash_with_group_id

from kvtransfer.compat.relied_on import ReliedOn, verify
from kvtransfer.retention.owned_blocks import OwnedBlocks

_POOL = "vllm.v1.core.block_pool:BlockPool"
_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"

FREE_QUEUE = ReliedOn(
    signatures={
        _QUEUE: {
            "__init__": ("self", "blocks"),
            "popleft": ("self",),
            "popleft_n": ("self", "n"),
            "remove": ("self", "block"),
            "append": ("self", "block"),
            "append_n": ("self", "blocks"),
            "prepend_n": ("self", "blocks"),
            "get_all_free_blocks": ("self",),
            "iter_blocks_after": ("self", "cursor"),
        },
    },
    attributes={_POOL: ("free_block_queue",)},
    uses={
        _QUEUE: dict.fromkeys(("popleft_n", "remove", "append_n", "prepend_n"), ("num_free_blocks",)),
        # Freed blocks with a hash are appended, those without one are taken first.
        _POOL: {
            "get_new_blocks": ("popleft_n",),
            "touch": ("remove",),
            "free_blocks": ("prepend_n", "append_n"),
            "get_num_free_blocks": ("num_free_blocks",),
        },
    },
)


FIRST_GROUP = make_block_hash_with_group_id(b"", 0)


class OwnedBlocksLast(FreeKVCacheBlockQueue):
    """Queue of free blocks in which those with an owner are taken last, in the eviction order of the owners.

    The thread of the control socket ends conversations, which moves blocks within the queue. So each method
    holds the lock.
    """

    def __init__(self, blocks: list[Any], owned: OwnedBlocks, lock: AbstractContextManager[Any]) -> None:
        super().__init__([])
        self._owned, self._lock = owned, lock
        owned.on_unowned = self._append_unowned
        self.append_n(blocks)

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        with self._lock:
            blocks: list[Any] = super().popleft_n(min(n, self.num_free_blocks - self._owned.released))
            if missing := n - len(blocks):
                blocks += self._owned.evict(missing)
                self.num_free_blocks -= missing
            return blocks

    def remove(self, block: Any) -> None:
        with self._lock:
            if self._owned.reclaim(block):
                self.num_free_blocks -= 1
            else:
                super().remove(block)

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        with self._lock:
            unowned = [block for block in blocks if not self._release(block)]
            self.num_free_blocks += len(blocks) - len(unowned)
            super().append_n(unowned)

    def prepend_n(self, blocks: list[Any]) -> None:
        with self._lock:
            super().prepend_n(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        with self._lock:
            blocks = [*super().iter_blocks_after(None), *self._owned.in_eviction_order()]
        return iter(blocks if cursor is None else blocks[blocks.index(cursor) + 1 :])

    def _release(self, block: Any) -> bool:
        key = key_of(block)
        return key is not None and self._owned.release(key, block)

    def _append_unowned(self, block: Any) -> None:
        self.num_free_blocks -= 1  # the block is counted already
        super().append(block)


def take_owned_blocks_last(pool: Any, owned: OwnedBlocks, lock: AbstractContextManager[Any]) -> None:
    """Replace a pool's queue of free blocks by one that takes the blocks of conversations last."""
    verify(FREE_QUEUE)
    pool.free_block_queue = OwnedBlocksLast(pool.free_block_queue.get_all_free_blocks(), owned, lock)


def key_of(block: Any) -> bytes | None:
    """Return the key under which a block's contents can be found, or None if they have no key."""
    with_group: bytes | None = block.block_hash  # equals `block_key`, except in the first group
    return with_group.removesuffix(FIRST_GROUP) if with_group is not None else None
