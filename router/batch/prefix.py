"""Which lines begin alike.

A prefix key is three digests of the first 256, 2,048 and 16,384 characters of what the engine will read.
Sorting by it puts the lines with the longest common beginnings next to one another; its first two digests
name the group that is best served by one decoder, whose prefix cache then holds the common part.
"""

from collections.abc import Iterator, Mapping, Sequence

import orjson
import xxhash

_STEPS = (256, 2_048, 16_384)
_DIGITS = 8
GROUP_CHARS = 2 * _DIGITS


def prefix_key(body: Mapping[str, object]) -> str:
    text = _leading_text(body, _STEPS[-1])
    return "".join(xxhash.xxh32_hexdigest(text[:step].encode()) for step in _STEPS)


def group_of(key: str) -> str:
    return key[:GROUP_CHARS]


def _leading_text(body: Mapping[str, object], enough: int) -> str:
    pieces: list[str] = []
    length = 0
    for piece in _pieces(body):
        pieces.append(piece[: enough - length])
        length += len(pieces[-1])
        if length >= enough:
            break
    return "".join(pieces)


def _pieces(body: Mapping[str, object]) -> Iterator[str]:
    """The parts of a request in the order in which chat templates put them before the model."""
    yield str(body.get("model"))
    if body.get("tools"):
        yield orjson.dumps(body["tools"]).decode()
    if isinstance(body.get("instructions"), str):
        yield str(body["instructions"])
    for name in ("messages", "prompt", "input"):
        content = body.get(name)
        if isinstance(content, str):
            yield content
        elif isinstance(content, Sequence):
            for item in content:
                yield item if isinstance(item, str) else orjson.dumps(item).decode()
