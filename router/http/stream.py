"""A response in passing: what it says about itself, and the pump that passes its tokens on.

The observer sees two sorts of facts: *when* things came (first token, first content, last event), found by
looking for marks until the first content has come; and *what* it was (finish reason, usage, id, tool call,
error), read once at the end from the first and last bytes, which are all that is kept. Between the two a
token costs a look at the clock and a place in the list of last pieces. Generated text cannot be mistaken
for a mark: its quotes are escaped.

The pump takes a stream once its first content has come, as long as each read is one whole event. Transports
and their protocols touch more memory for a token than its two system calls do; here one loop makes the
calls for every stream that has something. Whatever is not simply the next event goes back to the stream's
connection, and with it, if need be, the stream. Sockets are plain: the server speaks no TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from router.http.responder import MOST_LINES_BYTES, Responder, SentPieces

log = logging.getLogger("conserve.router.http.stream")

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


class TokenUsage(NamedTuple):
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
    usage: TokenUsage | None
    reasoned: bool
    """Its first token was one of reasoning."""


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
        "_reasoned",
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
        self._called_tool = self._reasoned = False
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

    @property
    def streamed(self) -> bool:
        return self._streamed

    @property
    def holds_end(self) -> bool:
        """What comes from here on is the end of the answer, and waits for ``at_end``."""
        return False

    def at_end(self) -> asyncio.Future[None] | None:
        """All of the answer has been fed: what its end waits for, if anything."""
        return None

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
            (says := self._first_content_at is not None or self._called_tool) or _has_reasoning(data)
        ):
            self._reasoned = not says or _has_value(data, REASONING_KEYS, STRING)
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
            reasoned=self._reasoned or (not self._streamed and _has_value(last, REASONING_KEYS, STRING)),
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


def read_usage(text: bytes) -> TokenUsage | None:
    """The last usage object in ``text``, in the shape of any API."""
    match = _last_value(text, b'"usage"', OBJECT)
    fields = _object_at(text, match.end() - 1) if match else None
    if fields is None:
        return None
    return usage_of(fields)


def usage_of(fields: dict[str, Any]) -> TokenUsage | None:
    """Anthropic counts what was cached apart from `input_tokens`; the others count it in."""
    prompt = fields.get("prompt_tokens", fields.get("input_tokens"))
    completion = fields.get("completion_tokens", fields.get("output_tokens", 0))
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details") or {}
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    read, written = fields.get("cache_read_input_tokens"), fields.get("cache_creation_input_tokens")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(prompt + (read or 0) + (written or 0), completion, cached if read is None else read)


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


LARGEST_EVENT = 4096
LARGEST_READ = 65536
LETTER_D = ord("d")
SPARE_BYTES = 64
AT_ONCE = 256
NEWLINE = 10
# The size line of a read that is exactly one chunk, by the length of that read; else "-".
SIZE_LINES = [b"-"] * (LARGEST_EVENT + 1)
CONTENT_LINES = [b"%x\r\n" % _size for _size in range(LARGEST_EVENT)]  # the size line of so much content
for _size in range(1, LARGEST_EVENT - 6):
    _line = CONTENT_LINES[_size]
    SIZE_LINES[len(_line) + _size + 2] = _line


class Passage:
    """One stream's way through the pump, from the reads of an engine's socket to the client's.

    ``read_aside`` gets data that is not one whole event; empty, there is something else to see: an end, an
    error. ``write_aside`` gets what the client's socket did not take.
    """

    __slots__ = (
        "client", "keep", "lines", "observer", "read_aside", "read_bytes", "responder", "write_aside",
    )  # fmt: skip

    def __init__(
        self,
        client: int,
        responder: Responder,
        observer: StreamObserver,
        read_aside: Callable[[bytes], None],
        write_aside: Callable[[bytes], None],
        event_bytes: int,
        sent: SentPieces | None,
    ) -> None:
        self.client = client
        self.lines = sent.lines if sent is not None and sent.lined else None
        self.responder = responder
        self.observer = observer
        self.keep = observer.last_pieces.append
        self.read_aside = read_aside
        self.write_aside = write_aside
        # Little more than an event needs: a large buffer for each read costs more than filling it.
        self.read_bytes = min(event_bytes + SPARE_BYTES, LARGEST_EVENT)

    def aside(self, engine: int, data: bytes) -> None:
        if len(data) == self.read_bytes:
            with contextlib.suppress(OSError):
                data += os.read(engine, LARGEST_READ)
            self.read_bytes = min(len(data) + SPARE_BYTES, LARGEST_EVENT)
        self.read_aside(data)


class Pump:
    """One for each loop, in an epoll of its own that the loop watches.

    Reports are edge-triggered: after a read that did not fill its buffer, the next byte or the end is
    reported.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._passages: dict[int, Passage] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._run)

    def take(self, engine: int, passage: Passage) -> None:
        """``engine``: a socket's number. Until ``drop`` nobody else reads it or writes to the client."""
        self._passages[engine] = passage
        self._epoll.register(engine, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)

    def drop(self, engine: int) -> None:
        """Before either socket is closed: its number may be another's at once."""
        del self._passages[engine]
        self._epoll.unregister(engine)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    @property
    def streams(self) -> int:
        return len(self._passages)

    def _run(self) -> None:
        passages, size_lines = self._passages, SIZE_LINES
        read, write, only_bytes = os.read, os.write, select.EPOLLIN
        now = time.monotonic()
        for engine, events in self._epoll.poll(0, AT_ONCE):
            if engine not in passages:
                continue  # dropped on account of one before it
            passage = passages[engine]
            most = passage.read_bytes
            try:
                data = read(engine, most) if events == only_bytes else b""
            except OSError:
                data = b""
            size = len(data)
            lines, line_end = passage.lines, 0
            if lines is not None:  # one line, and one event of one line behind it
                line_end = data.find(b"\n", BEHIND_SIZE_LINE) + 1
            if (
                size == most
                or data.find(b"\n", line_end or BEHIND_SIZE_LINE) != size - 4
                or not data.startswith(size_lines[size])
                or data[-3] != NEWLINE
                or data[-1] != NEWLINE
                or (lines is not None and data[line_end] != LETTER_D)
            ):
                passage.aside(engine, data)
                continue
            if lines is not None:
                if len(lines) < MOST_LINES_BYTES:
                    lines += data[len(size_lines[size]) : line_end]
                data = CONTENT_LINES[size - line_end - 2] + data[line_end:]
                size = len(data)
            observer = passage.observer
            observer.last_at = now
            observer.events += 1
            passage.keep(data)
            try:
                sent = write(passage.client, data)
            except OSError:
                sent = 0
            if sent != size:
                passage.write_aside(data[sent:])


def pump_of(loop: asyncio.AbstractEventLoop) -> Pump | None:
    """None where the system has no epoll: every token then goes through the transports."""
    if hasattr(select, "epoll"):
        return Pump(loop)
    log.warning("no epoll on this system: a streamed token costs more")
    return None
