"""An append-only log that survives `kill -9`: length, checksum, payload; fsync in groups.

`append` is cheap and reaches the disk soon; `durable` returns when all that was appended before it is there.
Compaction writes a snapshot beside the log while appends go on to both, and then renames it over the log:
every record is self-contained, so that replaying an append before the snapshot entry it belongs to does no
harm.
"""

import asyncio
import fcntl
import logging
import os
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

from xxhash import xxh3_64_intdigest

log = logging.getLogger("conserve.router.directory.journal")

_HEAD = struct.Struct("<IQ")
_MAX_RECORD = 1 << 24
_LAZY_S = 0.05  # how long a record that nobody waits for may stay in memory
_SNAPSHOT_SLICE = 200  # records between two turns of the event loop


class JournalError(RuntimeError):
    """The journal cannot be read or written; the text says what to do."""


def frame(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), xxh3_64_intdigest(payload)) + payload


def read(data: bytes) -> tuple[list[bytes], int]:
    """The records of a log, and how many bytes of it are whole: a crash can tear the last record."""
    records: list[bytes] = []
    at = 0
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        payload = data[start : start + length]
        if length > _MAX_RECORD or len(payload) < length or xxh3_64_intdigest(payload) != checksum:
            break
        records.append(payload)
        at = start + length
    return records, at


class Journal:
    def __init__(self, path: Path, sync: Callable[[int], None] = os.fdatasync) -> None:
        self._path = path
        self._sync = sync
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._buffer = bytearray()
        self._second: bytearray | None = None  # appends of a compaction under way
        self._flushing: asyncio.Task[None] | None = None
        self._swapping: asyncio.Future[None] | None = None  # the end of a compaction: no flush may begin
        self._lazy: asyncio.TimerHandle | None = None
        self._fd = -1
        self.size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JournalError(f"{path} is in use by another directory; stop that one first") from None

    def open(self) -> list[bytes]:
        """Replay, cut off a torn tail, and be ready to append."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        data = self._path.read_bytes()
        records, whole = read(data)
        if whole < len(data):
            torn = self._path.with_suffix(".torn")
            torn.write_bytes(data[whole:])
            log.warning("torn end cut off bytes=%d file=%s kept=%s", len(data) - whole, self._path, torn.name)
            os.ftruncate(self._fd, whole)
        os.fsync(self._fd)
        self.size = whole
        return records

    def append(self, payload: bytes) -> None:
        data = frame(payload)
        self._buffer += data
        if self._second is not None:
            self._second += data
        if self._lazy is None and self._flushing is None:
            self._lazy = asyncio.get_running_loop().call_later(_LAZY_S, self._start_flush)

    async def durable(self) -> None:
        """All that was appended before is on the disk. Callers that come together share one fsync."""
        if self._flushing is not None:
            await asyncio.shield(self._flushing)
        if self._swapping is not None:
            await asyncio.shield(self._swapping)
        if self._buffer:
            self._start_flush()
        if self._flushing is not None:
            await asyncio.shield(self._flushing)

    async def compact(self, records: Iterable[bytes]) -> None:
        """Replace the log by `records` and whatever is appended meanwhile."""
        await self.durable()
        self._second = bytearray()
        path = self._path.with_suffix(".compacting")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        size = 0
        loop = asyncio.get_running_loop()
        try:
            remaining = iter(records)
            while part := b"".join(frame(record) for record in islice(remaining, _SNAPSHOT_SLICE)):
                size += await loop.run_in_executor(self._thread, _write_all, fd, part)
            await loop.run_in_executor(self._thread, self._sync, fd)
            self._swapping = loop.create_future()
            if self._flushing is not None:
                await asyncio.wait([self._flushing])
            # From here on nothing awaits: no append can fall between the two files.
            size += _write_all(fd, self._second)
            self._sync(fd)
            os.rename(path, self._path)
            _sync_folder(self._path.parent)
            os.close(self._fd)
            self._fd, self.size = fd, size
            self._buffer.clear()
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        finally:
            self._second = None
            if self._swapping is not None:
                self._swapping.set_result(None)
                self._swapping = None

    async def close(self) -> None:
        if self._lazy is not None:
            self._lazy.cancel()
        with suppress(JournalError):
            await self.durable()
        self._thread.shutdown(wait=True)
        os.close(self._fd)
        os.close(self._lock)

    def _start_flush(self) -> None:
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if self._flushing is None and self._swapping is None and self._buffer:
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
            self._flushing.add_done_callback(_retrieve)

    async def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, data)
        except OSError as wrong:
            self._buffer[:0] = data  # the next flush tries again
            self._flushing = None
            log.error("cannot write file=%s reason=%r", self._path, str(wrong))
            raise JournalError(f"cannot write {self._path}: {wrong}; free space or fix the disk") from wrong
        self.size += len(data)
        self._flushing = None
        self._start_flush()

    def _write(self, data: bytes) -> None:
        try:
            _write_all(self._fd, data)
            self._sync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)  # half a record would hide those after it
            raise


def _retrieve(flush: asyncio.Task[None]) -> None:
    """Who waited has got the error, and it is in the log: an unawaited flush is not a second error."""
    if not flush.cancelled():
        flush.exception()


def _write_all(fd: int, data: bytes | bytearray) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
