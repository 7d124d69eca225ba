"""What of a stream its client has, in the engine's words: enough for another engine to go on with it.

Asked to, an engine writes a line in front of each piece of a stream: the tokens of its outputs since the last
one, as in `:12,13;14;` (workers/answers.py), in the first also how long the prompt is and how much of it
was cached. The line is kept and not passed on. Most pieces are one event in one chunk, which loses its line
in one cut; all else takes the long way.
"""

from __future__ import annotations

import re
from uuid import uuid4

from router.http.request import RawHeaders

# What engines are asked and say.
PIECES = b"x-stream-pieces"
SEED = b"x-stream-seed"
CREATED = b"x-stream-created"
COUNTED = b"x-stream-counts"

LINE = re.compile(rb"^:(?:=[0-9]+(?:/[0-9]+)?=)?[0-9,;-]*\n", re.MULTILINE)
TOKEN = re.compile(rb"[0-9]+")
COUNTS = re.compile(rb"=([0-9]+)(?:/([0-9]+))?=")
CREATED_AT = re.compile(rb'"created(?:_at)?": ?([0-9.]+)')
NOT_TO_BE_CONTINUED = b"-"
MOST_BYTES = 256 * 1024  # of a stream's lines, some 30,000 tokens: they are held, and read in one go


class SentPieces:
    """Of one stream: the lines of the pieces that the client has."""

    __slots__ = ("_created", "_seed", "comment", "lined", "lines", "torn")

    def __init__(self) -> None:
        self.lines = bytearray()
        self.lined = False
        """The engine writes lines."""
        self.torn = False
        """The client has a part of an event."""
        self.comment = b""
        """For the client, in front of what the next engine says."""
        self._seed = uuid4().hex.encode()
        self._created = b""

    @property
    def headers(self) -> RawHeaders:
        """For the engine that begins, and for one that goes on."""
        said = [(PIECES, b"%d" % self.pieces), (SEED, self._seed), (COUNTED, b"1")]
        return [*said, (CREATED, self._created)] if self._created else said

    @property
    def pieces(self) -> int:
        return self.lines.count(b"\n")

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each of the engine's outputs."""
        each = COUNTS.sub(b"", self.lines).replace(b":", b"").replace(b"\n", b"").split(b";")[:-1]
        return [[int(token) for token in one.split(b",")] if one else [] for one in each]

    @property
    def prompt(self) -> tuple[int, int | None] | None:
        """Its tokens, and how many of them were cached, as the engine that began has said."""
        found = COUNTS.search(self.lines)
        return (int(found[1]), int(found[2]) if found[2] else None) if found else None

    @property
    def generated(self) -> int | None:
        """Tokens; None where the lines do not have them all."""
        whole = len(self.lines) < MOST_BYTES and NOT_TO_BE_CONTINUED not in self.lines
        return len(TOKEN.findall(COUNTS.sub(b"", self.lines))) if whole else None

    @property
    def why_not(self) -> str | None:
        """Why another engine cannot go on with it."""
        if not self.lined:
            return "not_lined"
        if len(self.lines) >= MOST_BYTES:
            return "too_long"
        if self.torn:
            return "torn"
        return "not_exact" if NOT_TO_BE_CONTINUED in self.lines else None

    @property
    def can_go_on(self) -> bool:
        return self.why_not is None

    def cut(self, data: bytes) -> bytes:
        """Whole events without their lines."""
        if not self._created and (found := CREATED_AT.search(data)):
            self._created = found[1]
        if len(self.lines) < MOST_BYTES:
            for line in LINE.findall(data):
                self.lines += line
        return LINE.sub(b"", data)

    def cut_chunk(self, framed: bytes, start: int) -> bytes | None:
        """One piece, in its framing; None: it is not simply that."""
        end = framed.find(b"\n", start) + 1
        if framed[start : start + 1] != b":" or framed[start + 1 : start + 2] == b" ":
            return None
        if len(self.lines) < MOST_BYTES:
            self.lines += framed[start:end]
        return b"%x\r\n" % (len(framed) - end - 2) + framed[end:]
