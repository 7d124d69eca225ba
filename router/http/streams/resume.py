"""Resume protocol of streams: record what another engine needs to continue a stream whose engine was lost.

On request an engine writes a *token line* in front of each event: the ids of the tokens generated since the
event before, as in ``:12,13;14;`` (`workers/engine/resume/`). The first line also says how long the prompt is
and how much of it was cached. The gateway keeps the lines and removes them from the client's stream.
"""

from __future__ import annotations

import re
from uuid import uuid4

from router.http.request import RawHeaders
from router.http.streams.sse_observer import EVENT_ENDS

# Headers of the protocol: the first is also in the response of an engine that writes token lines.
EVENTS_HEADER = b"x-stream-pieces"
SEED_HEADER = b"x-stream-seed"
CREATED_HEADER = b"x-stream-created"
COUNTS_HEADER = b"x-stream-counts"

TOKEN_LINE = re.compile(rb"^:(?:=[0-9]+(?:/[0-9]+)?=)?[0-9,;-]*\n", re.MULTILINE)
TOKEN_ID = re.compile(rb"[0-9]+")
PROMPT_COUNTS = re.compile(rb"=([0-9]+)(?:/([0-9]+))?=")
CREATED_AT = re.compile(rb'"created(?:_at)?": ?([0-9.]+)')
NOT_RESUMABLE = b"-"
# Largest size of a stream's token lines, about 30,000 tokens: they are held in memory and parsed at once.
MAX_LINES_BYTES = 256 * 1024


class StreamProgress:
    """Tokens of a stream that its client has received, as the engine reported them.

    Nearly every chunk is one token line and one event, which `strip_chunk` separates with one cut.
    """

    __slots__ = ("_created", "_seed", "lines", "mid_event", "reported", "resume_comment")

    def __init__(self) -> None:
        self.lines = bytearray()
        self.reported = False
        """The engine writes token lines."""
        self.mid_event = False
        """The client has received a part of an event."""
        self.resume_comment = b""
        """Comment for the client, in front of the next engine's events."""
        self._seed = uuid4().hex.encode()
        self._created = b""

    @property
    def headers(self) -> RawHeaders:
        """Return headers that make an engine write token lines and continue after the client's last event."""
        headers = [(EVENTS_HEADER, b"%d" % self.events), (SEED_HEADER, self._seed), (COUNTS_HEADER, b"1")]
        return [*headers, (CREATED_HEADER, self._created)] if self._created else headers

    def response_started(self, status: int, headers: RawHeaders) -> None:
        self.reported = status == 200 and any(name.lower() == EVENTS_HEADER for name, _ in headers)

    @property
    def events(self) -> int:
        """Return how many events with a token line the client has received."""
        return self.lines.count(b"\n")

    @property
    def outputs(self) -> list[list[int]]:
        """Return the generated token ids of each output (choice) of the stream."""
        outputs = PROMPT_COUNTS.sub(b"", self.lines).replace(b":", b"").replace(b"\n", b"").split(b";")[:-1]
        return [[int(token) for token in output.split(b",")] if output else [] for output in outputs]

    @property
    def prompt_tokens(self) -> tuple[int, int | None] | None:
        """Return the number of prompt tokens, and of cached ones, as the first engine reported them."""
        found = PROMPT_COUNTS.search(self.lines)
        return (int(found[1]), int(found[2]) if found[2] else None) if found else None

    @property
    def generated_tokens(self) -> int | None:
        """Return the number of generated tokens; None if the token lines are incomplete."""
        if len(self.lines) >= MAX_LINES_BYTES or NOT_RESUMABLE in self.lines:
            return None
        return len(TOKEN_ID.findall(PROMPT_COUNTS.sub(b"", self.lines)))

    @property
    def obstacle(self) -> str | None:
        """Return why no other engine can continue the stream; None if another engine can."""
        if not self.reported:
            return "not_lined"
        if len(self.lines) >= MAX_LINES_BYTES:
            return "too_long"
        if self.mid_event:
            return "torn"
        return "not_exact" if NOT_RESUMABLE in self.lines else None

    def strip(self, data: bytes) -> bytes:
        """Store and remove the token lines in ``data``; return the rest, which the client gets."""
        self.mid_event = not data.endswith(EVENT_ENDS)
        if not self._created and (found := CREATED_AT.search(data)):
            self._created = found[1]
        if len(self.lines) < MAX_LINES_BYTES:
            for line in TOKEN_LINE.findall(data):
                self.lines += line
        return TOKEN_LINE.sub(b"", data)

    def strip_chunk(self, framed: bytes, start: int) -> bytes | None:
        """Store the token line of a chunk that is one such line and one event; return the rest of the chunk.

        Returns None for any other chunk.
        """
        end = framed.find(b"\n", start) + 1
        if framed[start : start + 1] != b":" or framed[start + 1 : start + 2] == b" ":
            return None
        if len(self.lines) < MAX_LINES_BYTES:
            self.lines += framed[start:end]
        return b"%x\r\n" % (len(framed) - end - 2) + framed[end:]
