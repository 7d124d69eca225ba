"""Lanes show what each conversation did when, and stay small."""

from router.directory.lanes import Lanes


def test_a_turn_is_prefill_then_decode_then_the_pause_it_ends_in() -> None:
    lanes = Lanes()
    lanes.turn_started("a", "decode-0", transferred=True, now=10.0)
    lanes.first_token("a", 12.0)
    lanes.turn_ended("a", tool_call=True, tokens=900, now=13.0)
    lanes.turn_started("a", "decode-0", transferred=False, now=15.0)
    (lane,) = lanes.newest_first(since=0.0)
    assert lane["spans"] == [["prefill", 10.0], ["decode", 12.0], ["tool", 13.0], ["wait", 15.0]]
    assert (lane["turns"], lane["transfers"], lane["tokens"]) == (2, 1, 900)


def test_the_lanes_with_the_latest_events_are_kept() -> None:
    lanes = Lanes(conversations=3)
    for second, key in enumerate("abcd"):
        lanes.turn_started(key, "decode-0", transferred=False, now=float(second))
    lanes.first_token("b", 9.0)
    assert [lane["key"] for lane in lanes.newest_first(since=0.0)] == ["b", "d", "c"]
    lanes.turn_started("e", "decode-0", transferred=False, now=10.0)
    assert [lane["key"] for lane in lanes.newest_first(since=0.0)] == ["e", "b", "d"]


def test_a_lane_keeps_its_latest_spans() -> None:
    lanes = Lanes(spans=4)
    for turn in range(50):
        lanes.turn_started("a", "decode-0", transferred=False, now=2.0 * turn)
        lanes.turn_ended("a", tool_call=True, tokens=0, now=2.0 * turn + 1)
    (lane,) = lanes.newest_first(since=0.0)
    assert [at for _, at in lane["spans"]] == [96.0, 97.0, 98.0, 99.0]


def test_an_ended_conversation_leaves_the_picture_after_a_while() -> None:
    lanes = Lanes()
    lanes.turn_started("a", "decode-0", transferred=False, now=1.0)
    lanes.conversation_ended("a", "deleted", 2.0)
    assert [lane["ended"] for lane in lanes.newest_first(since=0.0)] == ["deleted"]
    assert not list(lanes.newest_first(since=3.0))


def test_a_parked_pause_is_shown_and_a_late_report_of_it_is_not() -> None:
    lanes = Lanes()
    lanes.turn_started("a", "decode-0", transferred=False, now=1.0)
    lanes.turn_ended("a", tool_call=False, tokens=3, now=2.0)
    lanes.parked("a", 3.0)
    lanes.turn_started("a", "decode-0", transferred=False, now=4.0)
    lanes.parked("a", 4.1)
    (lane,) = lanes.newest_first(since=0.0)
    assert lane["spans"] == [["wait", 1.0], ["idle", 2.0], ["parked", 3.0], ["wait", 4.0]]


def test_events_of_unknown_conversations_are_nothing() -> None:
    lanes = Lanes()
    lanes.first_token("x", 1.0)
    lanes.turn_ended("x", tool_call=False, tokens=3, now=2.0)
    lanes.parked("x", 3.0)
    lanes.conversation_ended("x", "ttl", 4.0)
    assert len(lanes) == 0
