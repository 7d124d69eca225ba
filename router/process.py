"""Parts that all processes of the router share: logs, a steady clock, garbage collection, watched files.

Logs are one line an event, as `time LEVEL logger event key=value ...`, to standard error. What concerns a
turn names its `conversation` and, once an engine has answered, its `request`: the id of the answer, which the
client has and the engine logs. No line holds text of a prompt or an answer.
"""

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("conserve.router.process")

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85, 0x2028, 0x2029)} | {
    10: "\\n",
    13: "\\r",
}


class OneLine(logging.Formatter):
    """Also what spans lines elsewhere: a traceback, or a path that a client chose with line breaks in it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._second, self._written = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:  # written once a second: a line took a third longer otherwise
            self._second, self._written = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._written}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.isprintable() else line.translate(_CONTROL)


def log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Our lines name neither thread nor process nor place in the code: to find them out was a third of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[assignment]  # documented: "Optimization" in logging's how-to


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # counts while the machine sleeps, too


class SteadyClock:
    """Seconds since 1970 that go on when somebody sets the system's clock.

    The system's clock is read once, at the start. Expiry dates that people wrote down (of API keys) go by the
    system's clock itself.
    """

    def __init__(
        self, since_boot: Callable[[], float] = _since_boot, system: Callable[[], float] = time.time
    ) -> None:
        self._since_boot = since_boot
        self._zero = system() - since_boot()

    def __call__(self) -> float:
        return self._zero + self._since_boot()

    def not_before(self, newest: float) -> None:
        """Never go back behind a time that a store already holds."""
        self._zero = max(self._zero, newest - self._since_boot())


# Garbage collection of a process that serves streams or places turns: what it takes, all of them wait for.
# CPython looks for objects that refer to each other in three generations. The young and the middle one are
# small here, and hold the loop for some milliseconds. The old one has whatever lives longer, all
# conversations that a gateway knows among it: looking at it took 0.2 and 0.3 s under 100,000 tampered
# requests. So it is left to moments in which nothing is under way. What is freed often does not wait for it:
# a connection that has closed refers to nothing that refers to it (`RequestParser.close`).

# Default is 700, which was a sixth of the processor time under a storm of connections; 20,000 takes no less
# than this and holds the loop four times as long.
YOUNG_OBJECTS, YOUNG_PER_MIDDLE = 5_000, 10
NEVER = 2**31 - 1
LOOKS_S = 30.0
AT_LATEST_S = 3600.0


def settle_heap() -> None:
    """Call once when all that lives long is made: it is never looked at again. Needs `collect_when_idle`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PER_MIDDLE, NEVER)


async def collect_when_idle(
    idle: Callable[[], bool], looks_s: float = LOOKS_S, at_latest_s: float = AT_LATEST_S
) -> None:
    """Full collections, where something has become old since the last; one an hour without an idle moment."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(looks_s)
        began, free = time.monotonic(), idle()
        if (free or began - last > at_latest_s) and gc.get_count()[2]:
            found = gc.collect()
            last = time.monotonic()
            say = log.debug if free else log.warning
            say("collected objects=%d held_s=%.3f idle=%s", found, last - began, free)


LOOK_EVERY_S = 1.0
_LONGEST_PAUSE = 30  # looks between attempts to read what could not be read, doubled each time


class WatchedFiles:
    """Files that are read again when they have become others: API keys, certificates.

    Whoever reads the files says so before (`begin`), and afterwards whether the same ones are worth
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
