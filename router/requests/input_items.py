"""Items of a Responses request as bytes: found in its body, or written from an `input` that was parsed.

The items of a large body are cut from its bytes instead of being written again: serialising 32 MiB at once
would hold the gateway's event loop.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

_DECODER = json.JSONDecoder(parse_int=float)  # whole numbers of any length
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Span:
    """Position of a request's items in its body, without brackets; of a text, the text with its quotes."""

    start: int
    end: int
    text: bool = False


NO_ITEMS = Span(0, 0)


def write_items(given: object) -> bytes:
    """Return the items of a parsed `input`, with commas between them."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return orjson.dumps(items)[1:-1] if isinstance(items, list) else b""


def find_items(raw: bytes) -> Span:
    """Return where the items of `input` are in a valid JSON object. Of a repeated name the last counts."""
    found, text = NO_ITEMS, raw.decode("latin-1")  # one character for each byte
    at = _skip_space(text, text.index("{") + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _skip_space(text, _skip_space(text, at) + 1)
        value, end = _DECODER.raw_decode(text, start)
        if name == "input":
            found = Span(start, end, True) if isinstance(value, str) else NO_ITEMS
            if isinstance(value, list) and value:
                found = Span(start + 1, end - 1)
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return found


def _skip_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def cut_items(pieces: Iterable[bytes], where: Span) -> tuple[bytes, ...]:
    """Return the bytes of the items at `where` from a body that is held in pieces."""
    cut, at = [], 0
    for piece in pieces:
        if part := piece[max(0, where.start - at) : max(0, where.end - at)]:
            cut.append(part)
        at += len(piece)
    return (b'{"role":"user","content":', *cut, b"}") if where.text else tuple(cut)
