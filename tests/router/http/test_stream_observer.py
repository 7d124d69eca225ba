"""Tests of the stream observer with streams of every API, which are split anywhere."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http import StreamObserver, TokenUsage
from router.http.streams.sse_observer import EventBoundary
from tests.support.clock import Clock

SSE = b"text/event-stream; charset=utf-8"


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    choices = [] if delta is None else [choice]
    event = {"id": "chatcmpl-é1", "object": "chat.completion.chunk", "choices": choices, **more}
    return b"data: " + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 11,
    "total_tokens": 15,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 8},
}
CHAT = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "hm"}),
    chunk({"content": 'say "content":"x" and "usage":{ and "tool_calls":[{'}),
    chunk({"content": " b"}),
    chunk({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": ""}}]}),
    chunk({}, "tool_calls"),
    chunk(usage=USAGE),
    b"data: [DONE]\n\n",
]


def observed(pieces: list[bytes], clock: Clock | None = None, kind: bytes = SSE) -> StreamObserver:
    """Return an observer that was fed `pieces` as by the relay: whole events, one clock step a piece."""
    clock = clock or Clock(100.0)
    observer, boundary = StreamObserver(clock), EventBoundary()
    observer.start(200, kind)
    for piece in pieces:
        clock.now += 0.02
        if whole := boundary.complete(piece):
            observer.feed(whole)
    if rest := boundary.flush(b""):
        observer.feed(rest)
    return observer


def test_the_observer_of_a_chat_stream_finds_times_usage_and_finish_reason() -> None:
    seen = observed(CHAT).observation()
    assert seen.response_id == "chatcmpl-é1"
    assert seen.finish_reason == "tool_calls"
    assert seen.usage == TokenUsage(11, 4, 8)
    assert seen.events == 8
    assert seen.first_token_at == pytest.approx(100.04)
    assert seen.first_content_at == pytest.approx(100.06)
    assert seen.called_tool
    assert not seen.failed
    assert seen.last_at == pytest.approx(100.16)
    assert seen.gaps == 6


@settings(deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_gaps_between_tokens_are_counted_from_the_first_token_on(sizes: list[int]) -> None:
    clock = Clock(100.0)
    observer = StreamObserver(clock)
    observer.start(200, SSE)
    observer.feed(chunk({"role": "assistant", "content": ""}))
    for events in sizes:
        clock.now += 0.02
        observer.feed(chunk({"content": "a"}) * events)
    assert observer.observation().gaps == sum(sizes[1:])


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(CHAT) - 1), min_size=1, max_size=12), st.data())
def test_a_framed_chunk_is_observed_like_its_content(choice: list[int], data: st.DataObject) -> None:
    """Some chunks of a stream bypass the parser. The observation must not depend on which ones do."""
    events = [CHAT[index] * data.draw(st.integers(1, 2)) for index in choice]
    plain, passing = StreamObserver(lambda: 1.0), StreamObserver(lambda: 1.0)
    for observer in (plain, passing):
        observer.start(200, SSE)
    for event in events:
        plain.feed(event)
        if data.draw(st.booleans()):
            passing.feed_chunk(framed(event))
        else:
            passing.feed(event)
    assert passing.observation() == plain.observation()


ERROR = b'data: {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}\n\n'


NAMED = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"boom"}}\n\n'


@pytest.mark.parametrize("error", [ERROR, NAMED])
@pytest.mark.parametrize("before", [CHAT[:1], CHAT[:4], CHAT[:6]])
def test_a_stream_with_an_error_event_of_the_engine_is_observed_as_failed(
    before: list[bytes], error: bytes
) -> None:
    assert observed([*before, error, b"data: [DONE]\n\n"]).observation().failed
    clock_only = StreamObserver(Clock(100.0))
    clock_only.start(200, SSE)
    for event in before:
        clock_only.feed(event)
    clock_only.feed_chunk(framed(error))
    assert clock_only.observation().failed


def test_generated_text_about_errors_is_not_taken_for_an_error_event() -> None:
    talk = chunk({"content": 'data: {"error": {"message": "x"}}\n\ndata: {"error": {'})
    assert not observed([CHAT[0], talk, chunk({}, "stop")]).observation().failed


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=20))
def test_the_way_a_stream_is_split_changes_only_the_observed_times(cuts: list[int]) -> None:
    text = b"".join(CHAT)
    places = [0, *sorted({cut % len(text) for cut in cuts}), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    cut, whole = observed(pieces).observation(), observed(CHAT).observation()
    keep = ("status", "events", "response_id", "finish_reason", "usage")
    assert [getattr(cut, name) for name in keep] == [getattr(whole, name) for name in keep]
    assert cut.first_token_at is not None
    assert cut.called_tool
    assert cut.first_content_at is not None


@given(st.lists(st.binary(max_size=30), max_size=20), st.binary(max_size=10))
def test_the_event_boundary_passes_whole_events_and_loses_no_byte(pieces: list[bytes], tail: bytes) -> None:
    boundary = EventBoundary()
    passed = [boundary.complete(piece) for piece in pieces]
    assert all(part == b"" or part.endswith((b"\n\n", b"\r\n\r\n")) for part in passed)
    assert b"".join(passed) + boundary.flush(tail) == b"".join(pieces) + tail


def test_an_event_larger_than_the_limit_is_passed_in_parts() -> None:
    boundary = EventBoundary()
    text = b"data: " + b"x" * 300_000 + b"\n\n"
    pieces = [text[at : at + 10_000] for at in range(0, len(text), 10_000)]
    passed = [boundary.complete(piece) for piece in pieces]
    assert b"".join(passed) + boundary.flush(b"") == text
    assert max(map(len, passed)) < 100_000


def test_the_observer_of_a_completions_stream_finds_id_finish_reason_and_first_content() -> None:
    events = [
        b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n',
        b'data: {"id":"cmpl-1","choices":[{"index":0,"text":"","finish_reason":"length"}],"usage":null}\n\n',
    ]
    seen = observed(events).observation()
    assert (seen.response_id, seen.finish_reason, seen.usage) == ("cmpl-1", "length", None)
    assert seen.first_content_at == pytest.approx(100.02)


def test_the_observer_of_a_responses_stream_finds_usage_finish_reason_and_times() -> None:
    def event(kind: str, **fields: Any) -> bytes:
        text = json.dumps({"type": kind, **fields}, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()

    usage = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 2,
        "total_tokens": 7,
    }
    created = {"id": "resp_1", "object": "response", "status": "in_progress"}
    completed = {"id": "resp_1", "output": [{"text": "x" * 50_000}], "status": "completed", "usage": usage}
    events = [
        event("response.created", response={**created, "usage": None}),
        event("response.reasoning_text.delta", delta="hm"),
        event("response.output_text.delta", delta="a"),
        event("response.function_call_arguments.delta", delta="{"),
        event("response.completed", response=completed),
    ]
    seen = observed(events).observation()
    assert seen.response_id == "resp_1"
    assert (seen.usage, seen.finish_reason) == (TokenUsage(5, 2, 0), "completed")
    assert seen.first_token_at == pytest.approx(100.04)
    assert seen.first_content_at == pytest.approx(100.06)
    assert seen.called_tool


def test_usage_of_a_long_answer_is_found_without_keeping_its_middle() -> None:
    answer = {
        "id": "chatcmpl-2",
        "object": "chat.completion",
        "choices": [{"message": {"content": "y" * 500_000}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": None},
    }
    text = json.dumps(answer, indent=1).encode()
    observer = StreamObserver(Clock(100.0))
    observer.start(200, b"application/json")
    for at in range(0, len(text), 10_000):
        observer.feed(text[at : at + 10_000])
    seen = observer.observation()
    usage = TokenUsage(3, 1, None)
    assert (seen.response_id, seen.finish_reason, seen.usage) == ("chatcmpl-2", "stop", usage)
    assert not seen.streamed
    assert seen.first_token_at is None


def test_events_whose_lines_end_with_carriage_return_and_line_feed_are_counted() -> None:
    events = [piece.replace(b"\n", b"\r\n") for piece in CHAT]
    assert observed(events).observation().events == len(CHAT)


def test_the_observer_keeps_only_a_bounded_end_of_a_long_stream() -> None:
    observer = observed([chunk({"content": "word"})] * 5000)
    assert sum(map(len, observer.last_pieces)) < 20_000


def test_the_observer_reports_the_first_token_as_soon_as_it_comes() -> None:
    told: list[float] = []
    clock = Clock(100.0)
    observer = StreamObserver(clock, on_first_token=told.append)
    observer.start(200, SSE)
    for piece in CHAT:
        clock.now += 1
        observer.feed(piece)
    assert told == [102.0]


def test_the_observer_of_a_message_stream_finds_its_tool_call_and_cached_tokens() -> None:
    def named(kind: str, **data: object) -> bytes:
        return f"event: {kind}\n".encode() + b"data: " + json.dumps({"type": kind, **data}).encode() + b"\n\n"

    usage = {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 90}
    events = [
        named("message_start", message={"id": "msg_1", "content": [], "usage": {"input_tokens": 0}}),
        named("content_block_start", index=0, content_block={"type": "tool_use", "id": "t", "input": {}}),
        named("content_block_delta", index=0, delta={"type": "input_json_delta", "partial_json": "{}"}),
        named("message_delta", delta={"stop_reason": "tool_use", "stop_sequence": None}, usage=usage),
        named("message_stop"),
    ]
    observer = StreamObserver(lambda: 1.0)
    observer.start(200, b"text/event-stream")
    for one in events:
        observer.feed(one)
    seen = observer.observation()
    assert (seen.response_id, seen.finish_reason, seen.called_tool) == ("msg_1", "tool_use", True)
    assert (seen.usage, seen.events, seen.failed) == (TokenUsage(95, 7, 90), 5, False)
    observer.feed(named("error", error={"type": "overloaded_error", "message": "x"}))
    assert observer.observation().failed
