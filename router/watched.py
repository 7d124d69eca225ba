"""Files that are read again when they have become others: API keys, certificates."""

import asyncio
import logging
import os
from pathlib import Path

log = logging.getLogger("conserve.router.watched")

LOOK_EVERY_S = 1.0
_LONGEST_PAUSE = 30  # looks between attempts to read what could not be read, doubled each time


class WatchedFiles:
    """Whoever reads the files says so before (`begin`), and afterwards whether the same ones are worth
    another attempt (`ended`): a failure for want of descriptors, memory or time says nothing of them."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._read: object = None  # what they were when they were last read
        self._last: object = None  # what they were at the last look
        self._pause = 0  # looks before they are read again although they are the same; 0: they are not
        self._looks = 0  # since they were last read

    def begin(self) -> None:
        self._read, self._looks = self._state(), 0

    def ended(self, *, again: bool) -> None:
        self._pause = min(2 * self._pause or 1, _LONGEST_PAUSE) if again else 0

    async def due(self) -> None:
        """Returns when they are others and nobody writes to them, or when it is time for another attempt."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                before, self._last = self._last, await asyncio.to_thread(self._state)
            except RuntimeError as wrong:  # no thread can be had now
                log.warning("files not looked at files=%s reason=%r", [*map(str, self._files)], wrong)
                continue
            self._looks += 1
            if self._last == before and (self._last != self._read or 0 < self._pause <= self._looks):
                return

    def _state(self) -> object:
        return tuple(map(_stamp, self._files))


def content_of(file: Path, most: int) -> bytes:
    """At most one byte more than `most`. Of a pipe that nobody writes to: nothing, at once."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        return opened.read(most + 1)


def _stamp(file: Path) -> object:
    """Other for another content: ACME clients and Kubernetes put a link elsewhere."""
    try:
        found = file.stat()
    except OSError as wrong:
        return wrong.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
