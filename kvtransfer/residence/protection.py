"""In which order free blocks are used up: nothing's, offline work's, parked conversations', kept ones'.

Of kept conversations the oldest goes first, and of one conversation the last block.

vLLM takes blocks from the old end of its free queue, and puts freed ones with a hash at the young end. A
conversation's blocks are therefore in order by themselves; what ends, is parked or is offline is not.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol, TypeVar

from kvtransfer.residence.conversations import Conversation, Phase, Rank


class FreeBlock(Protocol):
    """A block nobody references."""

    @property
    def ref_cnt(self) -> int: ...


B = TypeVar("B", bound=FreeBlock)


def in_danger(
    queue: Iterable[B], rank_of: Callable[[B], Rank], window: int, above: Rank = Rank.NOTHING
) -> bool:
    """Whether one of the next `window` blocks to be taken is somebody's, of a rank above this."""
    return any(rank_of(block) > above for block in islice(queue, window))


def young_end(conversations: Iterable[Conversation], block_of: Callable[[bytes], B | None]) -> list[B]:
    """The free blocks that are somebody's, in the order in which they go, after all that are nothing's."""
    order: list[B] = []
    placed: set[int] = set()
    # Filled from the end: a block that several conversations share goes with the one that keeps it longest.
    for conversation in sorted(conversations, key=_staying, reverse=True):
        for block_hash in conversation.chain:
            block = block_of(block_hash)
            if block is not None and block.ref_cnt == 0 and id(block) not in placed:
                placed.add(id(block))
                order.append(block)
    order.reverse()
    return order


def _staying(conversation: Conversation) -> tuple[Rank, bool, float]:
    return conversation.rank, conversation.phase is Phase.RUNNING, conversation.last_used
