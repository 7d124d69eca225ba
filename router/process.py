"""Sets up what all router processes share: logs, a steady clock, garbage collection, watched files.

A log line is `time LEVEL logger event key=value ...`, on standard error. A line about a turn names its
`conversation` and, once an engine has answered, its `request`: the id of the answer, which the client has and
the engine logs. No line has text of a prompt or an answer.
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
    """Log formatter that writes every record as one line, even with a traceback or line breaks in values."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._second, self._written = 0, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:  # formatted once a second, which saves a quarter of a line's cost
            self._second, self._written = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._written}.{int(record.msecs):03d}Z"

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if line.isprintable() else line.translate(_CONTROL)


def log_to_stderr() -> None:
    """Send this process's logs to standard error, one line per record."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Lines name neither thread, process nor source line: looking them up was a third of a line's cost.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # type: ignore[assignment]  # documented: "Optimization" in logging's how-to


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # counts while the machine sleeps, too


class SteadyClock:
    """Clock in seconds since 1970 that does not jump when the system's clock is set.

    It reads the system's clock once, at the start. Only the expiry dates of API keys are compared with the
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
        """Move this clock forward to `newest`, the newest time in a store, if the clock is behind it."""
        self._zero = max(self._zero, newest - self._since_boot())


# Garbage collection stops the event loop, and with it every stream. CPython collects reference cycles in
# three generations. The young and the middle one are small here and take some milliseconds. The old one has
# all conversations that a gateway knows: a collection took 0.2 to 0.3 s under 100,000 tampered requests. It
# runs only while nothing is under way (`collect_when_idle`). Objects that are freed often do not wait for it:
# a closed connection is in no reference cycle (`RequestParser.close`).

# CPython's default of 700 took a sixth of the processor time under a storm of connections. 20,000 saves no
# more than 5,000 and stops the loop four times as long.
YOUNG_OBJECTS, YOUNG_PER_MIDDLE = 5_000, 10
NEVER = 2**31 - 1
LOOKS_S = 30.0
AT_LATEST_S = 3600.0


def settle_heap() -> None:
    """Exempt all existing objects from garbage collection. Call this once, at the end of start-up.

    The process has to run `collect_when_idle` from then on.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PER_MIDDLE, NEVER)


async def collect_when_idle(
    idle: Callable[[], bool], looks_s: float = LOOKS_S, at_latest_s: float = AT_LATEST_S
) -> None:
    """Run full garbage collections while the process is idle, or after `at_latest_s` if it never is."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(looks_s)
        began, is_idle = time.monotonic(), idle()
        if (is_idle or began - last > at_latest_s) and gc.get_count()[2]:
            found = gc.collect()
            last = time.monotonic()
            level = logging.DEBUG if is_idle else logging.WARNING
            log.log(level, "collected objects=%d held_s=%.3f idle=%s", found, last - began, is_idle)


LOOK_EVERY_S = 1.0
_LONGEST_PAUSE = 30  # looks between two attempts to read a file that could not be read


class WatchedFiles:
    """Tells the reader of files, such as API keys or certificates, when to read them again.

    The reader calls `begin` before it reads and `ended` afterwards, with `again` if reading failed for a
    reason that may pass, such as too few file descriptors.
    """

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._read: object = None  # state of the files when they were last read
        self._last: object = None  # state at the last look
        self._pause = 0  # looks until unchanged files are read again; 0: never
        self._looks = 0  # since the files were last read

    def begin(self) -> None:
        self._read, self._looks = self._state(), 0

    def ended(self, *, again: bool) -> None:
        self._pause = min(2 * self._pause or 1, _LONGEST_PAUSE) if again else 0

    async def due(self) -> None:
        """Wait until the files have changed and are complete, or until the next retry is due."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                before, self._last = self._last, await asyncio.to_thread(self._state)
            except RuntimeError as error:  # no thread could be started
                log.warning("files not checked files=%s reason=%r", [*map(str, self._files)], error)
                continue
            self._looks += 1
            if self._last == before and (self._last != self._read or 0 < self._pause <= self._looks):
                return

    def _state(self) -> object:
        return tuple(map(_stamp, self._files))


def content_of(file: Path, most: int) -> bytes:
    """Return a file's content, cut to `most` + 1 bytes. A pipe without a writer counts as empty."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        return opened.read(most + 1)


def _stamp(file: Path) -> object:
    """Return a value that changes when the file's content changes, or the target of its link."""
    try:
        found = file.stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev
