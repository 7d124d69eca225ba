"""Lines of a file that may be larger than memory, with where each one lies."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    number: int  # from 1, as people and editors count
    offset: int
    length: int
    data: bytes | None  # None: longer than allowed, and not kept


def split_lines(chunks: Iterable[bytes], longest: int) -> Iterator[Line]:
    """Cut at newlines. Never holds more than `longest` bytes and one chunk."""
    number = 1
    offset = 0  # where the line under way began
    length = 0
    held: list[bytes] = []

    def finish() -> Line:
        data = b"".join(held) if length <= longest else None
        return Line(number, offset, length, data)

    for chunk in chunks:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            length += end - start
            if length <= longest:
                held.append(chunk[start:end])
            yield finish()
            number, offset, length, start = number + 1, offset + length + 1, 0, end + 1
            held.clear()
        length += len(chunk) - start
        if length <= longest:
            held.append(chunk[start:])
        else:
            held.clear()
    if length:
        yield finish()
