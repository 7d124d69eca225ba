"""Items of the Responses API as bytes: those of a request and of its answer, and a history of them.

Those of a large request are found in its bytes and not written anew, and a history stays in pieces: copying
or parsing 32 MiB at once would hold the gateway's loop.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

PIECE_BYTES = 1 << 20
_FED_BYTES = 1 << 16  # to the inflater at a time
_DECODER = json.JSONDecoder(parse_int=float)  # whole numbers of any length
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Span:
    """Where a request's items stand in its body, without brackets; of a text, the text with its quotes."""

    start: int
    end: int
    text: bool = False


NO_ITEMS = Span(0, 0)


def write_items(given: object) -> bytes:
    """Of an `input` that was read, with commas between them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return orjson.dumps(items)[1:-1] if isinstance(items, list) else b""


def find_items(raw: bytes) -> Span:
    """Of `input`, in a JSON object that has been parsed. Of a name that stands twice the last counts."""
    found, text = NO_ITEMS, raw.decode("latin-1")  # a character a byte
    at = _next(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _next(text, _next(text, at) + 1)
        value, end = _DECODER.raw_decode(text, start)
        if name == "input":
            found = Span(start, end, True) if isinstance(value, str) else NO_ITEMS
            if isinstance(value, list) and value:
                found = Span(start + 1, end - 1)
        at = _next(text, end)
        if text[at] == ",":
            at = _next(text, at + 1)
    return found


def _next(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def cut_items(pieces: Iterable[bytes], where: Span) -> tuple[bytes, ...]:
    """Likewise, in pieces."""
    cut, at = [], 0
    for piece in pieces:
        if part := piece[max(0, where.start - at) : max(0, where.end - at)]:
            cut.append(part)
        at += len(piece)
    return (b'{"role":"user","content":', *cut, b"}") if where.text else tuple(cut)


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """What is kept of an answer."""

    id: str
    items: bytes  # as those of a prompt, with commas between them
    shown: bytes  # the response itself, compressed


@dataclass(frozen=True, slots=True)
class AnswerParser:
    """Parser of an engine's answer that is to be stored."""

    space: str  # of its owner
    said: Mapping[str, Any]  # in place of what an engine says of the history

    def parse(self, pieces: Sequence[bytes]) -> ReadAnswer:
        """ValueError: it is no response, or none that could be gone on from."""
        answer = orjson.loads(b"".join(pieces))
        answer = answer.get("response", answer) if isinstance(answer, dict) else {}
        name, output = answer.get("id"), answer.get("output")
        if not isinstance(name, str) or not isinstance(output, list):
            raise ValueError("the engine's answer has no id or no output")
        items = [_as_input(item) for item in output if isinstance(item, dict)]
        shown = zlib.compress(orjson.dumps({**answer, **self.said, "store": True}), 1)
        return ReadAnswer(name, orjson.dumps(items)[1:-1], shown)


def _as_input(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as one of a prompt: without what is empty there."""
    return {name: value for name, value in item.items() if value is not None}


def inflated(data: bytes) -> Iterator[bytes]:
    """In pieces, however much it becomes."""
    inflater, view = zlib.decompressobj(), memoryview(data)
    for at in range(0, len(view), _FED_BYTES):
        fed: bytes | memoryview = view[at : at + _FED_BYTES]
        while fed:
            if piece := inflater.decompress(fed, PIECE_BYTES):
                yield piece
            fed = inflater.unconsumed_tail
    if rest := inflater.flush():
        yield rest


def without_brackets(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Of a list in pieces: what stands between its first byte and its last."""
    before = b""
    for number, piece in enumerate(pieces):
        if before:
            yield before
        before = piece if number else piece[1:]
    if before := before[:-1]:
        yield before


class Pieces:
    """Items one after another, in pieces that are neither crumbs nor too long to copy at once."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._crumbs: list[bytes] = []
        self._size = 0
        self._any = False

    def add(self, items: Iterable[bytes]) -> None:
        """With a comma before them where others stand before; none where there are none."""
        comma = self._any
        for part in items:
            self._put(b"," + part if comma else part)
            comma, self._any = False, True

    def _put(self, part: bytes) -> None:
        self._crumbs.append(part)
        self._size += len(part)
        if self._size >= PIECE_BYTES:
            self._pieces.append(b"".join(self._crumbs))
            self._crumbs, self._size = [], 0

    @property
    def all(self) -> tuple[bytes, ...]:
        return (*self._pieces, b"".join(self._crumbs)) if self._crumbs else tuple(self._pieces)
