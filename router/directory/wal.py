"""Write-ahead log of SQLite, read beside SQLite: are its frames what was written?

SQLite stops at the first frame that is not, and forgets what follows without a word. That is right for what a
crash tore: each commit is on the disk before the next one begins, so that only the last one can be. Whole
transactions behind a bad frame say that the file was damaged later.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">8I")  # magic, format, bytes of a page, checkpoints, two salts, two sums
_FRAME = struct.Struct(">6I")  # page, pages after a commit or 0, two salts, two sums
_LITTLE, _BIG = 0x377F0682, 0x377F0683  # magic: in which order sums take words
_FORMAT = 3007000
_PAGES = {1 << power for power in range(9, 17)}  # bytes that a page may have
_MASK = 0xFFFFFFFF

Sums = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Frame:
    page: int
    pages: int  # of the database, in the last frame of a transaction
    salts: Sums
    data: bytes
    good: bool


@dataclass(frozen=True, slots=True)
class Log:
    order: str
    salts: Sums
    good: bool  # the header is what was written
    frames: tuple[Frame, ...]

    @property
    def damage(self) -> str:
        """Empty where a crash at most has torn its end."""
        if not self.good:
            return "the head of its log is not what was written" if self.frames else ""
        bad = next((place for place, frame in enumerate(self.frames) if not frame.good), None)
        if bad is None:
            return ""
        ours = [place for place, frame in enumerate(self.frames) if frame.salts == self.salts]
        last = ours[-1] if ours else -1
        first_commit = next((at for at in range(bad, last + 1) if self.frames[at].pages), last)
        if first_commit >= last:
            return ""
        return f"frame {bad + 1} of {last + 1} in its log is not what was written, and others follow it"

    def mended(self, *, with_bad: bool) -> bytes:
        """The log with sums that are right for what is in it, up to its last commit: frames that are not what
        was written are in it as they are, or left out."""
        taken = [one for one in self.frames if one.salts == self.salts or not one.good]
        while taken and (not taken[-1].pages or taken[-1].salts != self.salts):
            taken.pop()
        most = max((one.pages for one in taken if one.good), default=1 << 20)
        bad_from = next((at for at, one in enumerate(taken) if not one.good), len(taken))
        size = len(taken[0].data) if taken else 4096
        magic = _BIG if self.order == ">" else _LITTLE
        head = struct.pack(">6I", magic, _FORMAT, size, 0, *self.salts)
        sums = _sum(self.order, head, (0, 0))
        made = [head + struct.pack(">2I", *sums)]
        for at, one in enumerate(taken):
            if at >= bad_from and (one.page > most or one.pages > most):
                continue
            if at == bad_from and not with_bad:
                continue
            start = struct.pack(">2I", one.page, one.pages)
            sums = _sum(self.order, one.data, _sum(self.order, start, sums))
            made.append(start + struct.pack(">4I", *self.salts, *sums) + one.data)
        return b"".join(made)


def read(path: Path) -> Log | None:
    """None: there is none, or nothing in it yet."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _HEADER.size:
        return None
    magic, _, size, _, *rest = _HEADER.unpack_from(data)
    order = ">" if magic == _BIG else "<"
    head = _sum(order, data[:24], (0, 0))
    good = head == (rest[2], rest[3]) and magic in (_BIG, _LITTLE) and size in _PAGES
    salts = rest[0], rest[1]
    if not good:
        size = size if size in _PAGES else 4096
        salts = next((its for _, _, its, *_ in _raw(data, size)), salts)  # frame 1 is never old
    return Log(order, salts, good, tuple(_frames(data, size, order, salts, (rest[2], rest[3]))))


def _raw(data: bytes, size: int) -> Iterator[tuple[int, int, Sums, Sums, int]]:
    for at in range(_HEADER.size, len(data) - size - _FRAME.size + 1, size + _FRAME.size):
        page, pages, *rest = _FRAME.unpack_from(data, at)
        yield page, pages, (rest[0], rest[1]), (rest[2], rest[3]), at


def _frames(data: bytes, size: int, order: str, salts: Sums, sums: Sums) -> Iterator[Frame]:
    """Each is judged as if all before it were good, by the sums that stand in the one before it."""
    for page, pages, its, said, at in _raw(data, size):
        content = data[at + _FRAME.size : at + _FRAME.size + size]
        found = _sum(order, content, _sum(order, data[at : at + 8], sums)) if its == salts else None
        yield Frame(page, pages, its, content, found == said)
        sums = said


def _sum(order: str, data: bytes, sums: Sums) -> Sums:
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        first = (first + words[at] + second) & _MASK
        second = (second + words[at + 1] + first) & _MASK
    return first, second
