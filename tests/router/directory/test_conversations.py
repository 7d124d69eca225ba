"""A conversation counts as parked until its next turn, its end, or the loss of its engine."""

from router.directory.conversations import ConversationRecord, ConversationRecords


def two_parked() -> ConversationRecords:
    conversations = ConversationRecords()
    for key in ("a", "b"):
        conversations.add(ConversationRecord(key, None, 0.0, 0.0))
        assert conversations.park(key, "decode-0" if key == "a" else "decode-1")
    assert conversations.parked == 2
    return conversations


def test_a_conversation_is_no_longer_parked_after_its_next_turn_or_its_end() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert conversations.parked == 1
    conversations.pop("b")
    assert conversations.parked == 0


def test_conversations_of_a_lost_engine_no_longer_count_as_parked() -> None:
    conversations = two_parked()
    conversations.engine_gone("decode-0")
    assert conversations.parked == 1


def test_a_report_does_not_park_unknown_or_running_conversations() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert not conversations.park("a", "decode-0")
    assert not conversations.park("nobody", "decode-0")
    assert conversations.parked == 1


def test_a_conversation_reported_parked_before_its_turns_end_is_parked_after_it() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert not conversations.park("a", "decode-0")
    conversations.turn_ended(a, "gateway-0", 1)
    assert a.parked and conversations.parked == 2


def alive(conversations: ConversationRecords, *keys: str) -> None:
    for key in keys:
        conversations.add(ConversationRecord(key, None, 0.0, 0.0))


def silent(conversations: ConversationRecords, now: float) -> set[str]:
    over = conversations.silent(now, ttl_s=10.0)
    for one in over:
        conversations.pop(one.key)
    return {one.key for one in over}


def test_a_lifetime_set_for_one_conversation_counts_from_its_last_turn() -> None:
    conversations = ConversationRecords()
    alive(conversations, "usual", "long", "short", "shorter")
    for key, ttl_s in (("long", 100.0), ("short", 3.0), ("shorter", 50.0)):
        conversations.let_live(conversations.get(key) or ConversationRecord(key, None, 0.0, 0.0), ttl_s)
    shorter, long = conversations.get("shorter"), conversations.get("long")
    assert shorter is not None and long is not None
    conversations.let_live(shorter, 5.0)
    assert silent(conversations, 2.9) == set()
    assert silent(conversations, 3.0) == {"short"}
    assert silent(conversations, 9.0) == {"shorter"}
    assert silent(conversations, 10.0) == {"usual"}
    conversations.touch(long, 60.0)
    assert silent(conversations, 159.0) == set()
    assert silent(conversations, 160.0) == {"long"}
    assert silent(conversations, 1e6) == set()


def test_a_conversation_restored_with_its_own_lifetime_ends_after_it() -> None:
    conversations = ConversationRecords()
    conversations.add(ConversationRecord("long", None, 0.0, 5.0, ttl_s=100.0))
    conversations.add(ConversationRecord("short", None, 0.0, 5.0, ttl_s=3.0))
    assert silent(conversations, 8.0) == {"short"}
    assert silent(conversations, 104.0) == set()
    assert silent(conversations, 105.0) == {"long"}


def test_a_running_turn_keeps_its_conversation_beyond_its_lifetime() -> None:
    conversations = ConversationRecords()
    alive(conversations, "a")
    a = conversations.get("a")
    assert a is not None
    conversations.let_live(a, 3.0)
    conversations.turn_began(a, "gateway-0", 1)
    assert silent(conversations, 20.0) == set()
    conversations.turn_ended(a, "gateway-0", 1)
    assert silent(conversations, 30.0) == {"a"}
