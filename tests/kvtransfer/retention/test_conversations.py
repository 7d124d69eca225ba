"""A conversation owns the blocks of its prefix from its first turn until it ends."""

from kvtransfer.retention.owned_blocks import EvictionRank
from kvtransfer.retention.retained_conversations import (
    RetainedConversations,
    RetentionPhase,
    all_kept,
    block_key,
)
from tests.support.clock import Clock


def chain(text: str) -> list[bytes]:
    return [text[: n + 1].encode() for n in range(len(text))]


def make() -> tuple[RetainedConversations, list[bytes], Clock]:
    unwanted: list[bytes] = []
    clock = Clock()
    return RetainedConversations(clock, unwanted.append), unwanted, clock


def turn(conversations: RetainedConversations, key: str, text: str, offline: bool = False) -> None:
    conversation = conversations.begin_turn(key, chain(text), offline)
    conversations.advance(conversation, chain(text))
    conversations.end_turn(conversation)


def test_a_conversation_keeps_its_blocks_between_turns() -> None:
    conversations, _, _ = make()
    turn(conversations, "a", "abc")
    found = conversations.get("a")
    assert found is not None and found.phase is RetentionPhase.RETAINED
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.RETAINED


def test_an_ended_conversation_owns_no_blocks() -> None:
    conversations, unwanted, _ = make()
    turn(conversations, "a", "abc")
    assert conversations.end("a")
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.NOTHING
    assert sorted(unwanted) == chain("abc")
    assert not conversations.end("a")


def test_a_conversation_that_ends_during_a_turn_is_forgotten_after_it() -> None:
    conversations, _, _ = make()
    running = conversations.begin_turn("a", chain("abc"))
    conversations.advance(running, chain("abc"))
    assert conversations.end("a")
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.RETAINED
    conversations.end_turn(running)
    assert len(conversations) == 0


def test_blocks_that_a_compacted_prompt_does_not_continue_are_released() -> None:
    conversations, unwanted, _ = make()
    turn(conversations, "a", "abcdef")
    conversations.begin_turn("a", chain("abXYZ"))
    assert conversations.blocks.rank_of(b"ab") is EvictionRank.RETAINED
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.NOTHING
    assert sorted(unwanted) == [b"abc", b"abcd", b"abcde", b"abcdef"]


def test_a_prefix_is_protected_while_several_conversations_share_it() -> None:
    conversations, _, _ = make()
    turn(conversations, "a", "xya")
    assert conversations.blocks.rank_of(b"xy") is EvictionRank.RETAINED
    turn(conversations, "b", "xyb")
    parked = conversations.get("a")
    assert parked is not None
    conversations.park(parked)
    assert conversations.blocks.rank_of(b"xya") is EvictionRank.PARKED
    assert conversations.blocks.rank_of(b"xy") is EvictionRank.SHARED
    conversations.end("b")
    assert conversations.blocks.rank_of(b"xy") is EvictionRank.PARKED


def test_offline_work_does_not_make_a_prefix_shared() -> None:
    conversations, _, _ = make()
    turn(conversations, "a", "xya")
    running = conversations.begin_turn("offline:1", chain("xyz"), offline=True)
    conversations.advance(running, chain("xyz"))
    assert conversations.blocks.rank_of(b"xy") is EvictionRank.RETAINED


def test_offline_work_owns_its_blocks_until_it_ends() -> None:
    conversations, unwanted, _ = make()
    running = conversations.begin_turn("offline:1", chain("abc"), offline=True)
    conversations.advance(running, chain("abc"))
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.OFFLINE
    conversations.end_turn(running)
    assert conversations.blocks.rank_of(b"abc") is EvictionRank.NOTHING
    assert len(unwanted) == 3


def test_a_conversation_evicted_from_the_host_is_retained_again_after_its_next_turn() -> None:
    conversations, unwanted, _ = make()
    turn(conversations, "a", "abc")
    found = conversations.get("a")
    assert found is not None
    conversations.park(found)
    conversations.leave_host(found)
    assert found.phase is RetentionPhase.RETAINED and not conversations.wanted_on_host(b"abc")
    assert len(unwanted) == 3
    turn(conversations, "a", "abcd")
    assert conversations.wanted_on_host(b"abc")


def test_retained_conversations_are_listed_by_their_last_use() -> None:
    conversations, _, clock = make()
    for key in "abc":
        clock.now += 1
        turn(conversations, key, key)
    clock.now += 1
    turn(conversations, "a", "aa")
    assert [c.key for c in conversations.retained_oldest_first()] == ["b", "c", "a"]


def test_prefetched_kv_is_evicted_after_kv_that_is_idle_for_longer() -> None:
    """Prefetched KV counts as in use until the turn is due, and from then on it ages like other KV."""
    conversations, _, clock = make()
    turn(conversations, "back", "b")
    back = conversations.get("back")
    assert back is not None
    left_at = clock.now
    conversations.park(back)
    clock.now += 10
    conversations.prefetched("back", left_at, 2.0)
    assert back.phase is RetentionPhase.RETAINED
    assert (back.due_at, back.kept_until) == (clock.now + 2, clock.now + 4)
    clock.now += 1
    turn(conversations, "left", "l")
    assert [c.key for c in conversations.retained_oldest_first()] == ["left", "back"]
    clock.now += 2
    turn(conversations, "later", "t")
    assert [c.key for c in conversations.retained_oldest_first()] == ["left", "back", "later"]
    turn(conversations, "back", "b")
    assert back.kept_until < clock.now, "of one pause only"


def test_a_prefetch_that_ends_after_its_turn_began_has_no_effect() -> None:
    conversations, _, clock = make()
    turn(conversations, "a", "a")
    left_at = clock.now
    conversations.prefetched("nobody", left_at, 2.0)
    clock.now += 10
    running = conversations.begin_turn("a", chain("a"))
    conversations.prefetched("a", left_at, 2.0)
    assert running.phase is RetentionPhase.RUNNING, "its turn has come meanwhile"
    conversations.advance(running, chain("a"))
    clock.now += 1
    conversations.end_turn(running)
    conversations.park(running)
    conversations.prefetched("a", left_at, 2.0)
    assert running.phase is RetentionPhase.PARKED, "and gone again"


def test_a_conversation_is_retained_when_the_last_of_its_concurrent_turns_ends() -> None:
    conversations, _, _ = make()
    first = conversations.begin_turn("a", chain("ab"))
    second = conversations.begin_turn("a", chain("ab"))
    conversations.end_turn(first)
    assert first.phase is RetentionPhase.RUNNING
    conversations.advance(second, chain("ab"))
    conversations.end_turn(second)
    assert second.phase is RetentionPhase.RETAINED


def windowed(blocks: int) -> int:
    """Return the index of the first of `blocks` blocks that a window of two blocks covers."""
    return max(0, blocks - 2)


def test_a_conversation_owns_the_last_blocks_of_a_window_group() -> None:
    unwanted: list[bytes] = []
    conversations = RetainedConversations(Clock(), unwanted.append, (all_kept, windowed))
    running = conversations.begin_turn("a", chain("abcd"))
    conversations.advance(running, chain("abcd"))
    assert list(conversations.keys(running)) == [
        *(b"a", b"ab", b"abc", block_key(b"abc", 1), b"abcd", block_key(b"abcd", 1))
    ]
    conversations.advance(running, chain("abcde"))
    assert unwanted == [block_key(b"abc", 1)]
    assert conversations.blocks.rank_of(block_key(b"abc", 1)) is EvictionRank.NOTHING
    assert conversations.blocks.rank_of(block_key(b"abcde", 1)) is EvictionRank.RETAINED
    conversations.end_turn(running)
    again = conversations.begin_turn("a", chain("abXY"))  # a shorter prefix has an earlier window
    assert list(conversations.keys(again)) == [b"a", block_key(b"a", 1), b"ab", block_key(b"ab", 1)]
    conversations.end("a")
    conversations.end_turn(again)
    assert all(conversations.blocks.rank_of(block) is EvictionRank.NOTHING for block in chain("abcde"))
    assert all(
        conversations.blocks.rank_of(block_key(one, 1)) is EvictionRank.NOTHING for one in chain("abcde")
    )
