"""What a response says about itself, seen in passing.

Two sorts of facts: *when* things came (first token, first content, last event), found by looking for marks
until the first content has come; and *what* it was (finish reason, usage, id, tool call, error), read once at
the end from the first and last bytes, which are all that is kept. Between the two a token costs a look at the
clock and a place in the list of last pieces. Generated text cannot be mistaken for a mark: its quotes are
escaped.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

# The end of a response, where finish reason and usage stand: of a stream the last events.
KEPT_PIECES = 8
KEPT_BYTES = 8 * 1024
BEHIND_SIZE_LINE = 5
BEGIN_BYTES = 1024

CONTENT_KEYS = (b'"content"', b'"text"')
REASONING_KEYS = (b'"reasoning"', b'"reasoning_content"', b'"thinking"')
DELTA = b'"delta"'
STRING = re.compile(rb'\s*:\s*"[^"]')
OBJECTS = re.compile(rb"\s*:\s*\[\s*\{")
WORD = re.compile(rb'\s*:\s*"(\w+)"')
OBJECT = re.compile(rb"\s*:\s*\{")
ERROR = re.compile(rb'(?:\A|\n)data: *\{ *"(?:error" *: *\{|type" *: *"error")')
TOOL_USE = re.compile(rb'"type" *: *"tool_use"')
ID = re.compile(rb'"id"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens the engine had in its cache; None when it does not say."""


class Observation(NamedTuple):
    """Times are of the observer's clock; None for what was not seen."""

    status: int
    streamed: bool
    last_at: float
    first_token_at: float | None
    """Of a stream, the first generated thing of any kind: content, reasoning or a tool call."""
    first_content_at: float | None
    events: int
    """Server-sent events. An engine sends one a token, or one for several tokens of one step."""
    gaps: int
    """Of ``events``, those that came after the first token's."""
    called_tool: bool
    failed: bool
    """The engine itself ended its stream with an error event."""
    response_id: str | None
    finish_reason: str | None
    usage: Usage | None


class StreamObserver:
    """For one response: ``start``, any number of ``feed``, then ``observation``."""

    __slots__ = (
        "_begin",
        "_called_tool",
        "_clock",
        "_event_end",
        "_events_to_first",
        "_first_content_at",
        "_first_token_at",
        "_status",
        "_streamed",
        "events",
        "last_at",
        "last_pieces",
        "on_first_token",
    )

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_first_token: Callable[[float], None] | None = None,
    ) -> None:
        self._clock = clock
        self.on_first_token = on_first_token
        """Called in the byte path with the time of the first token; must not block."""
        self._status = 0
        self._streamed = False
        self.last_at = clock()
        self._first_token_at: float | None = None
        self._first_content_at: float | None = None
        self._called_tool = False
        self.events = self._events_to_first = 0
        self._event_end = b"\n\n"
        self._begin = b""
        self.last_pieces: deque[bytes] = deque(maxlen=KEPT_PIECES)

    @property
    def first_token_at(self) -> float | None:
        return self._first_token_at

    @property
    def settled(self) -> bool:
        """Until the end only the number of events, the time of the last and the last pieces matter."""
        return self._first_content_at is not None

    def start(self, status: int, content_type: bytes) -> None:
        self._status = status
        self._streamed = content_type.startswith(b"text/event-stream")
        self.last_at = self._clock()

    def feed(self, data: bytes) -> None:
        """The next piece: of a stream whole events (``EventBoundary`` sees to that), else any bytes."""
        if not self._streamed:
            self._feed_whole_answer(data)
            return
        if not self.events:
            self._begin = data[:BEGIN_BYTES]
            if data.endswith(b"\r\n"):
                self._event_end = b"\r\n\r\n"
        self.last_at = self._clock()
        self.last_pieces.append(data)
        self.events += data.count(self._event_end)
        if self._first_content_at is None:
            self._look_for_firsts(data, self.last_at)

    def feed_chunk(self, framed: bytes) -> None:
        """One whole chunk of a stream, in its framing, that ends where an event does."""
        if self._first_content_at is None or framed.find(b"\n", BEHIND_SIZE_LINE) + 4 != len(framed):
            self.feed(framed[framed.find(b"\n") + 1 : -2])  # not simply one more event of one line
            return
        self.last_at = self._clock()
        self.last_pieces.append(framed)
        self.events += 1

    def _feed_whole_answer(self, data: bytes) -> None:
        self.last_at = self._clock()
        if len(self._begin) < BEGIN_BYTES:
            self._begin += data[:BEGIN_BYTES]
        tail = self.last_pieces.pop() + data if self.last_pieces else data
        self.last_pieces.append(tail[-KEPT_BYTES:])

    def _look_for_firsts(self, data: bytes, now: float) -> None:
        self._called_tool = self._called_tool or _has_tool_call(data)
        if _has_content(data):
            self._first_content_at = now
        if self._first_token_at is None and (
            self._first_content_at is not None
            or self._called_tool
            or _has_value(data, REASONING_KEYS, STRING)
            or (b"reasoning" in data and _has_value(data, (DELTA,), STRING))
        ):
            self._first_token_at = now
            self._events_to_first = self.events
            if self.on_first_token is not None:
                self.on_first_token(now)

    def observation(self) -> Observation:
        last = b"".join(self.last_pieces)
        tail = last[-KEPT_BYTES:]
        begin = self._begin if self._streamed or len(self._begin) < len(last) else b""  # not twice the same
        return Observation(
            status=self._status,
            streamed=self._streamed,
            last_at=self.last_at,
            first_token_at=self._first_token_at,
            first_content_at=self._first_content_at,
            events=self.events,
            gaps=self.events - self._events_to_first if self._first_token_at is not None else 0,
            called_tool=self._called_tool or _has_tool_call(last) or _has_tool_call(begin),
            failed=self._streamed and b'"error"' in last and any(map(ERROR.search, self.last_pieces)),
            response_id=read_id(self._begin),
            finish_reason=read_finish_reason(self._begin, tail),
            usage=read_usage(tail),
        )


def _has_value(text: bytes, keys: tuple[bytes, ...], value: re.Pattern[bytes]) -> bool:
    """One of the keys stands in ``text`` with such a value. Keys are found as plain bytes, which is fast."""
    for key in keys:
        at = text.find(key)
        while at >= 0:
            if value.match(text, at + len(key)):
                return True
            at = text.find(key, at + len(key))
    return False


def _has_content(text: bytes) -> bool:
    if _has_value(text, CONTENT_KEYS, STRING):
        return True
    return b"output_text.delta" in text and _has_value(text, (DELTA,), STRING)


def _has_tool_call(text: bytes) -> bool:
    if b"tool_" not in text and b"function_call" not in text:
        return False
    return (
        _has_value(text, (b'"tool_calls"',), OBJECTS)
        or b'"function_call"' in text
        or b"response.function_call_arguments.delta" in text
        or (b'"tool_use"' in text and TOOL_USE.search(text) is not None)
    )


def read_id(begin: bytes) -> str | None:
    match = ID.search(begin)
    return match[1].decode("utf-8", "replace") if match else None


def _last_value(text: bytes, key: bytes, value: re.Pattern[bytes]) -> re.Match[bytes] | None:
    at = text.rfind(key)
    while at >= 0:
        match = value.match(text, at + len(key))
        if match:
            return match
        at = text.rfind(key, 0, at)
    return None


def read_finish_reason(begin: bytes, tail: bytes) -> str | None:
    """Of chat and completions; of a response object its final status; of a message its stop reason."""
    match = _last_value(tail, b'"finish_reason"', WORD) or _last_value(tail, b'"stop_reason"', WORD)
    if match is None and b'"response' in begin:
        match = _last_value(tail, b'"status"', WORD)
    return match[1].decode() if match else None


def read_usage(text: bytes) -> Usage | None:
    """The last usage object in ``text``, in the shape of any API."""
    match = _last_value(text, b'"usage"', OBJECT)
    fields = _object_at(text, match.end() - 1) if match else None
    if fields is None:
        return None
    return usage_of(fields)


def usage_of(fields: dict[str, Any]) -> Usage | None:
    """Anthropic counts what was cached apart from `input_tokens`; the others count it in."""
    prompt = fields.get("prompt_tokens", fields.get("input_tokens"))
    completion = fields.get("completion_tokens", fields.get("output_tokens", 0))
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details") or {}
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    read, written = fields.get("cache_read_input_tokens"), fields.get("cache_creation_input_tokens")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(prompt + (read or 0) + (written or 0), completion, cached if read is None else read)


def _object_at(text: bytes, start: int) -> dict[str, Any] | None:
    """The JSON object that begins at ``start``; a usage object has no braces inside strings."""
    end = start
    depth = 0
    while True:
        closing = text.find(b"}", end)
        if closing < 0:
            return None
        depth += text.count(b"{", end, closing) - 1
        end = closing + 1
        if depth <= 0:
            break
    try:
        found = orjson.loads(text[start:end])
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
