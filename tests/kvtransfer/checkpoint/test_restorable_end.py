"""The host index finds how much of a prompt can be restored, for each kind of KV cache group."""

from types import SimpleNamespace

import pytest

from kvtransfer.checkpoint.host_index import HostIndex
from kvtransfer.retention.retained_conversations import STATE_WINDOW, CacheGroup, block_key

FULL, WINDOW = CacheGroup(("a",), 32, 64), CacheGroup(("b",), 32, 64, window=63)  # a window of two blocks
STATE = CacheGroup(("c",), 32, 64, STATE_WINDOW, state=True)
CHAIN = [b"block %d" % number for number in range(6)]


def index_of(*stored: set[int]) -> HostIndex:
    """Return a host index in which, for each group, the blocks of `CHAIN` with these numbers are stored."""
    index = HostIndex(slots=32)
    for group, numbers in enumerate(stored):
        for number in sorted(numbers):
            slot = index.begin_store(block_key(CHAIN[number], group))
            assert slot is not None
            index.end_store(slot.number)
    return index


@pytest.mark.parametrize(
    ("groups", "stored", "start", "end"),
    [
        ([FULL], [{0, 1, 2, 4, 5}], 0, 3),
        ([FULL], [{0, 1, 2, 4, 5}], 4, 6),
        ([FULL], [{0, 1, 2, 4, 5}], 3, 3),
        ([FULL, FULL], [{0, 1, 2, 3}, {0, 1}], 0, 2),
        ([FULL, WINDOW], [{0, 1, 2, 3, 4, 5}, {4, 5}], 0, 6),
        ([FULL, WINDOW], [{0, 1, 2, 3, 4, 5}, {1, 2, 5}], 0, 3),
        ([FULL, WINDOW], [{0, 1, 2, 3, 4, 5}, {5}], 0, 0),
        ([FULL, STATE], [{0, 1, 2, 3, 4, 5}, {1, 3}], 0, 4),
        ([FULL, STATE], [{0, 1, 2}, {1, 3}], 0, 2),
        ([FULL, WINDOW, STATE], [{0, 1, 2, 3, 4, 5}, {2, 3, 4, 5}, {2, 4}], 0, 5),
        ([FULL, WINDOW, STATE], [{0, 1, 2, 3, 4, 5}, {2, 3}, {2, 4}], 0, 0),
    ],
)
def test_a_prompt_is_restored_as_far_as_every_group_has_its_blocks(
    groups: list[CacheGroup], stored: list[set[int]], start: int, end: int
) -> None:
    assert index_of(*stored).restorable_end(groups, CHAIN, start, len(CHAIN)) == end


def test_blocks_cached_in_a_given_pool_count_as_restorable() -> None:
    cached = {(CHAIN[2], 0), (CHAIN[3], 1)}
    pool = SimpleNamespace(get_cached_block=lambda block, groups: ((block, *groups) in cached) or None)
    index = index_of({0, 1, 3}, {2})
    assert index.restorable_end([FULL, WINDOW], CHAIN, 0, len(CHAIN), pool) == 4
    assert index.restorable_end([FULL, WINDOW], CHAIN, 0, len(CHAIN)) == 0
