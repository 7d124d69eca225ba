"""Journal of the directory: what must survive it, one row a thing, in SQLite.

`append` is cheap and reaches the disk soon; `durable` returns when all that was appended before it is there.
Callers that come together share one transaction, and so one sync of the disk.

Each row has a sum of what was written. A file that is not what was written is refused as a whole, with the
command that says what is left of it (`repair.py`): what follows a damaged place is never dropped silently.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
from xxhash import xxh3_64_intdigest

from placement.engines import EngineInfo
from placement.routing.bindings import Binding
from router import metrics
from router.directory import wal
from router.directory.conversations import ConversationRecord
from router.errors import RouterError
from router.identity.prefix_chain import End
from router.process import SteadyClock, Zero

log = logging.getLogger("conserve.router.directory.journal")

VERSION = 2
_LAZY_S = 0.05  # how long a row that nobody waits for may stay in memory
_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0  # after a write that failed, doubled each time
LATE_S = 5.0  # a disk that has not answered for so long takes nothing, though it says nothing
_CANNOT = "the directory cannot write its journal"  # said to clients, who need not know where that is
MAX_UNWRITTEN = 10_000  # rows in memory while the disk refuses them, above which nothing new is placed
_SCHEMA = """
CREATE TABLE rows
    (id INTEGER PRIMARY KEY, subject TEXT, slot TEXT, payload BLOB, sum INTEGER, UNIQUE (subject, slot));
"""
_FROM: Mapping[int, str] = {
    0: _SCHEMA,  # a new file
    1: "ALTER TABLE rows ADD COLUMN sum INTEGER; UPDATE rows SET sum = checksum(subject, slot, payload);",
}
PUT = "INSERT OR REPLACE INTO rows (subject, slot, payload, sum) VALUES (?, ?, ?, ?)"  # the newest id: last
_NEWEST = """SELECT max(json_extract(CAST(payload AS TEXT), '$.used_at')) FROM rows
    WHERE subject LIKE 'c:%' AND slot IN ('whole', 'turns')"""
_DROP = "DELETE FROM rows WHERE subject = ? AND slot = ?"
_DROP_ALL = "DELETE FROM rows WHERE subject = ?"


class JournalError(RouterError):
    """The journal cannot be read or written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing about a conversation or an engine; without a payload it is forgotten, and without a slot all
    about its subject."""

    subject: str
    slot: str = ""
    payload: bytes | None = None

    @property
    def may_be_missed(self) -> bool:
        """Without it a conversation goes on after a restart, but counts or ids of prompts are older."""
        return self.payload is not None and (self.slot == _TURNS or self.slot.startswith(_NODE))


def checksum(subject: str, slot: str, payload: bytes) -> int:
    """As SQLite holds it, with a sign."""
    return xxh3_64_intdigest(f"{subject}\0{slot}\0".encode() + payload) - (1 << 63)


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Row] = []
        self._flushing: asyncio.Task[None] | None = None
        self._lazy: asyncio.TimerHandle | None = None  # of the next flush that nobody waits for
        self._retry_s = _RETRY_S
        self._failed = ""  # why the last flush did
        self._begun_at = self._said_of = 0.0  # the flush under way and the last late one, by the loop's clock
        self._silent = f"{_CANNOT}: the disk has not answered for {LATE_S:g} s; fix the disk"
        path.parent.mkdir(parents=True, exist_ok=True)
        if (log_file := wal.read(log_of(path))) is not None and log_file.damage:
            raise damaged(path, log_file.damage)  # before SQLite opens it, and forgets what follows
        self._rows = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except sqlite3.Error as wrong:
            self._rows.close()
            raise JournalError(_sentence(path, wrong)) from wrong
        except JournalError:
            self._rows.close()
            raise

    @classmethod
    def check(cls, path: Path) -> None:
        """JournalError where a directory could not begin with this file."""
        journal = cls(path)
        try:
            journal.read()
        finally:
            journal._end()

    @classmethod
    def create(cls, path: Path, rows: Iterable[Row]) -> None:
        """A new file with these rows."""
        made = cls(path)
        try:
            made._write(list(rows))
        finally:
            made._end()

    def read(self) -> list[Row]:
        """What has been written, in the order in which it was."""
        try:
            found = self._rows.execute("SELECT subject, slot, payload, sum FROM rows ORDER BY id").fetchall()
        except sqlite3.Error as wrong:
            raise JournalError(_sentence(self._path, wrong)) from wrong
        bad = sum(not is_whole(*row) for row in found)
        if bad:
            raise damaged(self._path, f"{bad} of {len(found)} rows are not what was written")
        return [Row(*row[:3]) for row in found if row[0] != _CLOCK]

    def resume(self, clock: SteadyClock) -> None:
        """The clock of what is written here counts on as it did."""
        asked = "SELECT payload FROM rows WHERE subject = ?"
        row = self._rows.execute(asked, (_CLOCK,)).fetchone()
        kept = msgspec.json.decode(row[0], type=Zero) if row is not None else None
        same = kept is not None and kept.boot == clock.zero.boot
        (newest,) = (0.0,) if same else self._rows.execute(_NEWEST).fetchone()
        zero = clock.resume(kept, newest or 0.0)
        if zero != kept:
            self._pending.append(Row(_CLOCK, _WHOLE, msgspec.json.encode(zero)))  # goes with the next flush

    def append(self, row: Row) -> None:
        """Refuses what could never be written: it would hold up all rows behind it."""
        try:
            f"{row.subject}{row.slot}".encode()
        except UnicodeEncodeError as wrong:
            raise JournalError(f"{row.subject!r} {row.slot!r} is no text that a journal can hold") from wrong
        if row.may_be_missed and self._full:
            metrics.JOURNAL_ROWS_MISSED.inc()
            return
        self._pending.append(row)
        if self._lazy is None and self._flushing is None:
            self._lazy = asyncio.get_running_loop().call_later(_LAZY_S, self._start_flush)

    async def durable(self) -> None:
        """All that was appended before is on the disk. JournalError: it is not, until the disk takes it."""
        await self._flushed()
        if self._pending:
            self._start_flush()
        await self._flushed()

    async def _flushed(self) -> None:
        if self._flushing is None:
            return
        try:
            async with asyncio.timeout_at(self._begun_at + LATE_S):
                await asyncio.shield(self._flushing)
        except TimeoutError:
            if self._said_of != self._begun_at:
                self._said_of = self._begun_at
                log.error("disk does not answer file=%s rows=%d", self._path, len(self._pending))
            raise JournalError(self._silent) from None

    def check_capacity(self) -> None:
        """Refuses new work while the disk takes nothing and too much waits for it."""
        if self._full:
            raise JournalError(self._failing)

    @property
    def _failing(self) -> str:
        """Why the disk takes nothing; empty: it does."""
        now = asyncio.get_running_loop().time()
        late = self._flushing is not None and now >= self._begun_at + LATE_S
        return self._silent if late else self._failed

    @property
    def _full(self) -> bool:
        return len(self._pending) > MAX_UNWRITTEN and bool(self._failing)

    async def close(self) -> None:
        with suppress(JournalError):
            await self.durable()
        if self._lazy is not None:
            self._lazy.cancel()
        self._end()

    def _end(self) -> None:
        self._thread.shutdown(wait=True)
        self._rows.close()

    def _prepare(self) -> None:
        self._rows.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._rows.execute("PRAGMA journal_mode = WAL")
        self._rows.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        (version,) = self._rows.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= VERSION:
            raise JournalError(
                f"{self._path} is a journal of version {version}, and this is version {VERSION}: start the "
                "version of conserve that wrote it, or move the file away (its conversations begin anew)"
            )
        self._rows.execute("BEGIN IMMEDIATE")
        self._rows.execute("COMMIT")
        (found,) = self._rows.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise damaged(self._path, found)
        with suppress(sqlite3.OperationalError):  # a full disk, which is said when something is written
            self._rows.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # no torn end behind new rows
        self._rows.create_function("checksum", 3, checksum, deterministic=True)
        while version < VERSION:
            then = version + 1 if version else VERSION
            self._rows.executescript(f"BEGIN; {_FROM[version]} PRAGMA user_version = {then}; COMMIT;")
            version = then

    def _start_flush(self) -> None:
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if self._flushing is None and self._pending:
            self._begun_at = asyncio.get_running_loop().time()
            self._flushing = asyncio.get_running_loop().create_task(self._flush())
            self._flushing.add_done_callback(_retrieve)

    async def _flush(self) -> None:
        loop, rows = asyncio.get_running_loop(), self._pending[:]
        try:
            await loop.run_in_executor(self._thread, self._write, rows)
        except Exception as wrong:  # whatever it is: the rows stay, and are tried again
            self._flushing = None
            self._failed = f"{_CANNOT}: {wrong}; free space or fix the disk"
            self._lazy = loop.call_later(self._retry_s, self._start_flush)
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            log.error("cannot write file=%s rows=%d reason=%r", self._path, len(rows), str(wrong))
            raise JournalError(self._failed) from wrong
        del self._pending[: len(rows)]
        self._flushing, self._failed, self._retry_s = None, "", _RETRY_S
        self._start_flush()

    def _write(self, rows: list[Row]) -> None:
        execute = self._rows.execute
        execute("BEGIN")
        try:
            for row in rows:
                if row.payload is not None:
                    sum_ = checksum(row.subject, row.slot, row.payload)
                    execute(PUT, (row.subject, row.slot, row.payload, sum_))
                elif row.slot:
                    execute(_DROP, (row.subject, row.slot))
                else:
                    execute(_DROP_ALL, (row.subject,))
            execute("COMMIT")
        except Exception:
            if self._rows.in_transaction:
                execute("ROLLBACK")
            raise


def _retrieve(flush: asyncio.Task[None]) -> None:
    """Who waited has got the error, and it is in the log: an unawaited flush is not a second error."""
    if not flush.cancelled():
        flush.exception()


def is_whole(subject: str, slot: str, payload: bytes, written: int | None) -> bool:
    """Whether a row of the file is what was written."""
    try:
        return written == checksum(subject, slot, payload)
    except (AttributeError, TypeError, UnicodeEncodeError):  # it has other types even
        return False


def damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        f"{path} is damaged: {what}. `conserve journal repair {path}` says what is left of it, and keeps a "
        "copy of it as it is"
    )


def log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _sentence(path: Path, wrong: sqlite3.Error) -> str:
    if "locked" in str(wrong):
        return f"{path} is in use by another directory; stop that one first"
    if "malformed" in str(wrong):
        return str(damaged(path, str(wrong)))
    if "full" in str(wrong) or "I/O" in str(wrong):
        return f"cannot write {path}: {wrong}; free space or fix the disk"
    return (
        f"{path} is no journal that this version can read ({wrong}): it is damaged, and "
        f"`conserve journal repair {path}` says what is left of it, or of a version before 1. Move it away; "
        "its conversations begin anew"
    )


# What is written of a conversation and an engine

_CONVERSATION, _ENGINE, _CLOCK = "c:", "e:", "clock"
_WHOLE, _TURNS, _BINDING, _NODE = "whole", "turns", "binding", "n:"
_BOUND = tuple[str, int, float]  # engine, epoch, since when
_COUNTS = ("used_at", "turns", "prompt_tokens", "completion_tokens", "output_tokens", "ttl_s")


def placed(conversation: ConversationRecord, binding: Binding) -> Iterator[Row]:
    fields = asdict(conversation)
    for name in ("running", "gateway", "placed", "prefix"):
        del fields[name]
    subject = _CONVERSATION + conversation.key
    yield Row(subject, _WHOLE, orjson.dumps(fields))
    yield Row(subject, _BINDING, orjson.dumps([binding.engine, binding.epoch, binding.bound_at]))


def turn_ended(conversation: ConversationRecord) -> Row:
    counts = {name: getattr(conversation, name) for name in _COUNTS}
    return Row(_CONVERSATION + conversation.key, _TURNS, orjson.dumps(counts))


def node(key: str, at: float, end: End) -> Row:
    place = [end.link.hex(), end.tail_bytes, end.tail_digest.hex(), at]
    return Row(_CONVERSATION + key, _NODE + end.digest.hex(), orjson.dumps(place))


def unbound(key: str) -> Row:
    return Row(_CONVERSATION + key, _BINDING)


def ended(key: str) -> Row:
    return Row(_CONVERSATION + key)


def engine(info: EngineInfo) -> Row:
    return Row(_ENGINE + info.engine, _WHOLE, orjson.dumps(asdict(info)))


def engine_gone(name: str) -> Row:
    return Row(_ENGINE + name)


@dataclass(slots=True)
class Remembered:
    """What the rows say, in order of use."""

    engines: list[EngineInfo]
    conversations: list[tuple[ConversationRecord, tuple[str, int, float] | None, list[End]]]


def remembered(rows: list[Row]) -> Remembered:
    """Of rows as they were written, or of those that are left of them. Fields that only a newer version knows
    are passed over."""
    try:
        return _remembered(rows)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as wrong:
        raise JournalError(
            f"a row of the directory's journal cannot be read ({wrong}): it is damaged, or of a newer "
            "version. Start that version, or move the journal away (its conversations begin anew)"
        ) from wrong


def _remembered(rows: list[Row]) -> Remembered:
    subjects: dict[str, dict[str, Any]] = {}
    for row in rows:
        slots = subjects.setdefault(row.subject, {})
        slots.pop(row.slot, None)
        if row.payload is not None:
            slots[row.slot] = orjson.loads(row.payload)
        elif not row.slot:
            del subjects[row.subject]
    found = Remembered([], [])
    for subject, slots in subjects.items():
        whole = slots.get(_WHOLE)
        if whole is None:
            continue
        if subject.startswith(_ENGINE):
            found.engines.append(msgspec.convert(whole, EngineInfo))
            continue
        record = msgspec.convert({**whole, **slots.get(_TURNS, {})}, ConversationRecord)
        nodes = []
        for slot, place in slots.items():
            if slot.startswith(_NODE):
                end = End(bytes.fromhex(place[0]), place[1], bytes.fromhex(place[2]))
                record.used_at = max(record.used_at, place[-1])
                if place[3] is not True:  # a response's id, from before answers were stored
                    nodes.append(end)
        record.used_at = max(record.used_at, whole["used_at"])
        bound = msgspec.convert(slots[_BINDING][:3], _BOUND) if _BINDING in slots else None
        found.conversations.append((record, bound, nodes))
    found.conversations.sort(key=lambda one: one[0].used_at)
    return found
