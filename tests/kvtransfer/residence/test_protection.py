"""Free blocks are evicted in the order of their value."""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.retention.eviction import eviction_order, in_danger, shared_order
from kvtransfer.retention.retained_conversations import EvictionRank, RetainedConversations


@dataclass(eq=False)
class HashedBlock:
    hash: bytes
    ref_cnt: int = 0


def block_of(blocks: dict[bytes, HashedBlock]) -> Callable[[bytes, int], HashedBlock | None]:
    return lambda block_hash, group: blocks.get(block_hash)


def conversations_in_all_ranks() -> RetainedConversations:
    now = [0.0]
    conversations = RetainedConversations(lambda: now[0], lambda block: None)
    for key, blocks in (("old", [b"s", b"o1", b"o2"]), ("parked", [b"p1"]), ("new", [b"s", b"n1"])):
        now[0] += 1
        conversation = conversations.begin_turn(key, blocks)
        conversations.advance(conversation, blocks)
        conversations.end_turn(conversation)
    parked = conversations.get("parked")
    assert parked is not None
    conversations.park(parked)
    offline = conversations.begin_turn("offline", [b"f1"], offline=True)
    conversations.advance(offline, [b"f1"])
    return conversations


def test_offline_kv_is_evicted_first_then_parked_then_the_oldest_each_from_its_end() -> None:
    blocks = {name: HashedBlock(name) for name in (b"s", b"o1", b"o2", b"p1", b"n1", b"f1")}
    order = [block.hash for block in eviction_order(conversations_in_all_ranks(), block_of(blocks))]
    assert order == [b"f1", b"p1", b"o2", b"o1", b"n1", b"s"]  # the shared one stays longest


def test_a_shared_prefix_is_evicted_after_more_recent_kv() -> None:
    now = [0.0]
    conversations = RetainedConversations(lambda: now[0], lambda block: None)
    for key, chain in (("a", [b"s", b"a"]), ("b", [b"s", b"b"]), ("newest", [b"n"])):
        now[0] += 1
        conversation = conversations.begin_turn(key, chain)
        conversations.advance(conversation, chain)
        conversations.end_turn(conversation)
    for key in "ab":
        parked = conversations.get(key)
        assert parked is not None
        conversations.park(parked)
    blocks = {name: HashedBlock(name) for name in (b"s", b"a", b"b", b"n")}
    order = [block.hash for block in eviction_order(conversations, block_of(blocks))]
    assert order == [b"a", b"b", b"n", b"s"]
    assert [block.hash for block in shared_order(conversations, block_of(blocks))] == [b"s"]


def test_blocks_in_use_are_not_evicted() -> None:
    blocks = {b"s": HashedBlock(b"s", ref_cnt=1), b"n1": HashedBlock(b"n1")}
    assert [block.hash for block in eviction_order(conversations_in_all_ranks(), block_of(blocks))] == [b"n1"]


def test_only_blocks_that_the_next_step_can_take_are_at_risk() -> None:
    conversations = conversations_in_all_ranks()
    queue = [HashedBlock(b"nobody"), HashedBlock(b"nobody"), HashedBlock(b"n1")]

    def rank_of(block: HashedBlock) -> EvictionRank:
        return conversations.rank_of(block.hash)

    assert not in_danger(queue, rank_of, window=2)
    assert in_danger(queue, rank_of, window=3)
    assert not in_danger(queue, rank_of, window=3, above=EvictionRank.RETAINED)
