"""Parts of a request's body as bytes: its known fields, and the items of a Responses request.

The parts of a large body are cut from its bytes instead of being written again, because serialising 32 MiB at
once would block the gateway's event loop.
"""

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

_DECODER = json.JSONDecoder(parse_int=float)  # whole numbers of any length
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a part of a body: of a field with its name, or of a list's items without the brackets."""

    start: int
    end: int
    text: bool = False  # the part is one item: a string with its quotes


NO_ITEMS = Span(0, 0)


def write_items(given: object) -> bytes:
    """Return the items of a parsed `input`, with commas between them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return orjson.dumps(items)[1:-1] if isinstance(items, list) else b""


def find_items(raw: bytes) -> Span:
    """Return the span of the items of `input` in a valid JSON object.

    If `input` is repeated, the last one counts.
    """
    found = NO_ITEMS
    for name, _, start, end, value in _fields(raw):
        if name == "input":
            found = Span(start, end, True) if isinstance(value, str) else NO_ITEMS
            if isinstance(value, list) and value:
                found = Span(start + 1, end - 1)
    return found


def find_fields(raw: bytes, names: Container[str]) -> tuple[Span, ...]:
    """Return the spans of the fields `names`, which are ASCII, in a valid JSON object.

    If a field is repeated, the last one counts.
    """
    return tuple({name: Span(at, end) for name, at, _, end, _ in _fields(raw) if name in names}.values())


def _fields(raw: bytes) -> Iterator[tuple[str, int, int, int, Any]]:
    """Yield each field of an object as its name, its start, its value's start and end, and its value."""
    text = raw.decode("latin-1")  # one character for each byte
    at = _skip_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, after = _DECODER.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, after) + 1)
        value, end = _DECODER.raw_decode(text, start)
        yield name, at, start, end, value
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def cut_items(pieces: Iterable[bytes], where: Span) -> tuple[bytes, ...]:
    """Return the bytes of the items at `where` from a body that is held in pieces."""
    cut = _cut(pieces, where)
    return (b'{"role":"user","content":', *cut, b"}") if where.text else tuple(cut)


def cut_fields(pieces: tuple[bytes, ...], where: Iterable[Span]) -> tuple[bytes, ...]:
    """Return a JSON object of the fields at `where`, cut from a body that is held in pieces."""
    parts = [part for span in where for part in (b",", *_cut(pieces, span))]
    return (b"{", *parts[1:], b"}")


def _cut(pieces: Iterable[bytes], where: Span) -> list[bytes]:
    cut, at = [], 0
    for piece in pieces:
        if part := piece[max(0, where.start - at) : max(0, where.end - at)]:
            cut.append(part)
        at += len(piece)
    return cut
