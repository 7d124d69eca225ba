"""Timelines show what each conversation did and when, and take a bounded amount of memory."""

from router.directory.conversations import Timeline


def test_a_turn_is_shown_as_prefill_then_decode_then_pause() -> None:
    timeline = Timeline()
    timeline.turn_started("a", "decode-0", transferred=True, now=10.0)
    timeline.first_token("a", 12.0)
    timeline.turn_ended("a", tool_call=True, tokens=900, now=13.0)
    timeline.turn_started("a", "decode-0", transferred=False, now=15.0)
    (one,) = timeline.newest_first(since=0.0)
    assert one["spans"] == [["prefill", 10.0], ["decode", 12.0], ["tool", 13.0], ["wait", 15.0]]
    assert (one["turns"], one["transfers"], one["tokens"]) == (2, 1, 900)


def test_beyond_the_limit_the_timelines_with_the_latest_events_are_kept() -> None:
    timeline = Timeline(conversations=3)
    for second, key in enumerate("abcd"):
        timeline.turn_started(key, "decode-0", transferred=False, now=float(second))
    timeline.first_token("b", 9.0)
    assert [one["key"] for one in timeline.newest_first(since=0.0)] == ["b", "d", "c"]
    timeline.turn_started("e", "decode-0", transferred=False, now=10.0)
    assert [one["key"] for one in timeline.newest_first(since=0.0)] == ["e", "b", "d"]


def test_a_timeline_keeps_its_latest_spans() -> None:
    timeline = Timeline(spans=4)
    for turn in range(50):
        timeline.turn_started("a", "decode-0", transferred=False, now=2.0 * turn)
        timeline.turn_ended("a", tool_call=True, tokens=0, now=2.0 * turn + 1)
    (one,) = timeline.newest_first(since=0.0)
    assert [at for _, at in one["spans"]] == [96.0, 97.0, 98.0, 99.0]


def test_an_ended_conversation_disappears_from_the_timelines_after_a_while() -> None:
    timeline = Timeline()
    timeline.turn_started("a", "decode-0", transferred=False, now=1.0)
    timeline.conversation_ended("a", "deleted", 2.0)
    assert [one["ended"] for one in timeline.newest_first(since=0.0)] == ["deleted"]
    assert not list(timeline.newest_first(since=3.0))


def test_a_pause_is_shown_as_parked_unless_the_parking_report_comes_too_late() -> None:
    timeline = Timeline()
    timeline.turn_started("a", "decode-0", transferred=False, now=1.0)
    timeline.turn_ended("a", tool_call=False, tokens=3, now=2.0)
    timeline.parked("a", 3.0)
    timeline.turn_started("a", "decode-0", transferred=False, now=4.0)
    timeline.parked("a", 4.1)
    (one,) = timeline.newest_first(since=0.0)
    assert one["spans"] == [["wait", 1.0], ["idle", 2.0], ["parked", 3.0], ["wait", 4.0]]


def test_timelines_ignore_events_of_unknown_conversations() -> None:
    timeline = Timeline()
    timeline.first_token("x", 1.0)
    timeline.turn_ended("x", tool_call=False, tokens=3, now=2.0)
    timeline.parked("x", 3.0)
    timeline.conversation_ended("x", "ttl", 4.0)
    assert len(timeline) == 0
