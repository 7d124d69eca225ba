"""Observer of responses, and a splitter of streams at the ends of server-sent events.

The observer learns *when* things came (first token, first content, last event) by looking for JSON keys until
the first content has come, and *what* the response was (finish reason, usage, id, tool call, error) once at
the end, from its first and last bytes. Only those bytes are kept. In between, a token costs one look at the
clock and one entry in a short list. Generated text cannot be mistaken for a key: its quotes are escaped.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

# The end of a response contains finish reason and usage: the last events of a stream, or the last bytes.
KEPT_EVENTS = 8
KEPT_BYTES = 8 * 1024
BEGIN_BYTES = 1024
AFTER_SIZE_LINE = 5  # length of `fff\r\n`: a line break at or after it ends a line of the event

EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
MAX_PARTIAL_BYTES = 64 * 1024

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


class EventBoundary:
    """Splits a stream at the ends of events, and keeps the beginning of an event until its end arrives.

    An engine writes one event at a time, so that nearly every piece passes as it is. If the engine dies
    inside an event, the error event that the gateway adds still stands alone. An event longer than
    ``MAX_PARTIAL_BYTES`` is passed in parts.
    """

    __slots__ = ("partial",)

    def __init__(self) -> None:
        self.partial = b""
        """Beginning of an event whose end has not come."""

    def complete(self, data: bytes) -> bytes:
        """Return the events that ``data`` completes, and keep the beginning of the next event."""
        if self.partial:
            data = self.partial + data
            self.partial = b""
        if data.endswith(EVENT_ENDS):
            return data
        end = max((data.rfind(mark) + len(mark) for mark in EVENT_ENDS if mark in data), default=0)
        if len(data) - end > MAX_PARTIAL_BYTES:
            return data
        self.partial = data[end:]
        return data[:end]

    def flush(self, tail: bytes) -> bytes:
        """Return the kept beginning of an event, followed by ``tail``, with which the stream ended."""
        partial, self.partial = self.partial, b""
        return partial + tail


class TokenUsage(NamedTuple):
    """Token counts of one response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the engine had in its cache; None when it does not report them."""


class Observation(NamedTuple):
    """Facts about one response. Times are of the observer's clock. A fact that was not seen is None."""

    status: int
    streamed: bool
    last_at: float
    first_token_at: float | None
    """Time of a stream's first generated output of any kind: content, reasoning or a tool call."""
    first_content_at: float | None
    events: int
    """Number of server-sent events. An engine sends one for each token or for several tokens of one step."""
    gaps: int
    """Number of ``events`` after the event of the first token."""
    called_tool: bool
    failed: bool
    """The engine itself ended its stream with an error event."""
    response_id: str | None
    finish_reason: str | None
    usage: TokenUsage | None
    reasoned: bool
    """The first token was a token of reasoning."""


class StreamObserver:
    """Observer of one response: ``start``, any number of ``feed``, then ``observation``."""

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
        self._called_tool = self._reasoned = False
        self.events = self._events_to_first = 0
        self._event_end = b"\n\n"
        self._begin = b""
        self.last_pieces: deque[bytes] = deque(maxlen=KEPT_EVENTS)

    @property
    def first_token_at(self) -> float | None:
        return self._first_token_at

    @property
    def first_content_seen(self) -> bool:
        """Return whether the first content has come, after which events are only counted and timed."""
        return self._first_content_at is not None

    @property
    def streamed(self) -> bool:
        return self._streamed

    @property
    def holds_end(self) -> bool:
        """Return whether the client may get the data fed last only after the future of ``at_end``."""
        return False

    def at_end(self) -> asyncio.Future[None] | None:
        """Finish observing. Returns a future for which the answer's end must wait, or None."""
        return None

    def start(self, status: int, content_type: bytes) -> None:
        self._status = status
        self._streamed = content_type.startswith(b"text/event-stream")
        self.last_at = self._clock()

    def feed(self, data: bytes) -> None:
        """Observe the next piece: whole events of a stream (see `EventBoundary`), otherwise any bytes."""
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
        """Observe one whole chunk of a stream, with its framing; it ends with an event."""
        if self._first_content_at is None or framed.find(b"\n", AFTER_SIZE_LINE) + 4 != len(framed):
            self.feed(framed[framed.find(b"\n") + 1 : -2])  # several events, or an event of several lines
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
        if self._first_token_at is not None:
            return
        answers = self._first_content_at is not None or self._called_tool
        if answers or _has_reasoning(data):
            self._reasoned = not answers or _has_value(data, REASONING_KEYS, STRING)
            self._first_token_at = now
            self._events_to_first = self.events
            if self.on_first_token is not None:
                self.on_first_token(now)

    def observation(self) -> Observation:
        last = b"".join(self.last_pieces)
        tail = last[-KEPT_BYTES:]
        begin = self._begin if self._streamed or len(self._begin) < len(last) else b""  # else `last` has it
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
            response_id=find_id(self._begin),
            finish_reason=find_finish_reason(self._begin, tail),
            usage=find_usage(tail),
            reasoned=self._reasoned or (not self._streamed and _has_value(last, REASONING_KEYS, STRING)),
        )


def _has_value(text: bytes, keys: tuple[bytes, ...], value: re.Pattern[bytes]) -> bool:
    """Return whether a key in ``text`` has one of these values. Searching plain bytes is fast."""
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


def _has_reasoning(text: bytes) -> bool:
    if _has_value(text, REASONING_KEYS, STRING):
        return True
    return b"reasoning" in text and _has_value(text, (DELTA,), STRING)


def _has_tool_call(text: bytes) -> bool:
    if b"tool_" not in text and b"function_call" not in text:
        return False
    return (
        _has_value(text, (b'"tool_calls"',), OBJECTS)
        or b'"function_call"' in text
        or b"response.function_call_arguments.delta" in text
        or (b'"tool_use"' in text and TOOL_USE.search(text) is not None)
    )


def find_id(begin: bytes) -> str | None:
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


def find_finish_reason(begin: bytes, tail: bytes) -> str | None:
    """Return a completion's finish reason, a message's stop reason or a response object's final status."""
    match = _last_value(tail, b'"finish_reason"', WORD) or _last_value(tail, b'"stop_reason"', WORD)
    if match is None and b'"response' in begin:
        match = _last_value(tail, b'"status"', WORD)
    return match[1].decode() if match else None


def find_usage(text: bytes) -> TokenUsage | None:
    """Return the last usage object in ``text``, in the shape of any API."""
    match = _last_value(text, b'"usage"', OBJECT)
    fields = _object_at(text, match.end() - 1) if match else None
    if fields is None:
        return None
    return usage_from(fields)


def usage_from(fields: dict[str, Any]) -> TokenUsage | None:
    """Return the token counts of a usage object, or None if it has none.

    Anthropic's `input_tokens` exclude cached tokens; other APIs include them.
    """
    prompt = fields.get("prompt_tokens", fields.get("input_tokens"))
    completion = fields.get("completion_tokens", fields.get("output_tokens", 0))
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details") or {}
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    read, written = fields.get("cache_read_input_tokens"), fields.get("cache_creation_input_tokens")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(prompt + (read or 0) + (written or 0), completion, cached if read is None else read)


def _object_at(text: bytes, start: int) -> dict[str, Any] | None:
    """Parse the JSON object that begins at ``start``; a usage object has no braces inside strings."""
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
