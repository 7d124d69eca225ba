"""How many conversations are parked: until their next turn, their end, or their engine's."""

from router.directory.conversations import ConversationRecord, ConversationRecords


def two_parked() -> ConversationRecords:
    conversations = ConversationRecords()
    for key in ("a", "b"):
        conversations.add(ConversationRecord(key, None, 0.0, 0.0))
        assert conversations.park(key, "decode-0" if key == "a" else "decode-1")
    assert conversations.parked == 2
    return conversations


def test_a_turn_and_an_end_take_it_back() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert conversations.parked == 1
    conversations.pop("b")
    assert conversations.parked == 0


def test_an_engine_that_is_gone_has_nothing_parked() -> None:
    conversations = two_parked()
    conversations.engine_gone("decode-0")
    assert conversations.parked == 1


def test_what_is_unknown_or_runs_is_not_parked() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert not conversations.park("a", "decode-0")
    assert not conversations.park("nobody", "decode-0")
    assert conversations.parked == 1


def test_an_engine_may_say_so_before_the_turn_has_ended_here() -> None:
    conversations = two_parked()
    a = conversations.get("a")
    assert a is not None
    conversations.turn_began(a, "gateway-0", 1)
    assert not conversations.park("a", "decode-0")
    conversations.turn_ended(a, "gateway-0", 1)
    assert a.parked and conversations.parked == 2
