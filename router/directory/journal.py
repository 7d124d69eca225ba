"""The directory's journal: rows that survive a restart, in one SQLite file.

`append` queues a row, which is written soon. `durable` returns once all rows appended before it are on disk.
Callers that wait together share one transaction, and so one sync of the disk.

A damaged journal is refused as a whole, and the error names the command that repairs it. Each row has a
checksum, SQLite checks its pages, and each transaction has a number. SQLite silently drops the end of its
write-ahead log from the first bad frame on. The file `journal-sequence` holds the number of the last commit,
so that more than one missing transaction is noticed. One may be missing, because a crash can tear the last.
"""

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from xxhash import xxh3_64_intdigest

from router import metrics
from router.errors import RouterError

log = logging.getLogger("conserve.router.directory.journal")

VERSION = 2
_LAZY_S = 0.05  # how long a row that nobody waits for may stay in memory
_RETRY_S, _LONGEST_RETRY_S = 0.2, 5.0  # pause after a failed write, doubled each time up to the longest
LATE_S = 5.0  # a disk that has not answered for this long counts as failing
_CANNOT = "the directory cannot write its journal"  # for clients, therefore without the path
MAX_UNWRITTEN = 10_000  # rows in memory while the disk refuses them, above which nothing new is placed
CONVERSATION, ENGINE = "c:", "e:"  # prefixes of subjects
TURNS, NODE = "turns", "n:"  # slots of turn counts and of ends of prompts
_SEQUENCE = "sequence"  # subject of the row with the number of its transaction
_DIGITS = 20  # of the number in the sequence file
_TERM = "term"  # subject of the row with the directory's term
_SCHEMA = f"""BEGIN;
CREATE TABLE rows
    (id INTEGER PRIMARY KEY, subject TEXT, slot TEXT, payload BLOB, sum INTEGER, UNIQUE (subject, slot));
PRAGMA user_version = {VERSION};
COMMIT;"""
# A replaced row gets a new id, so that it is read last.
_PUT = "INSERT OR REPLACE INTO rows (subject, slot, payload, sum) VALUES (?, ?, ?, ?)"
_DROP = "DELETE FROM rows WHERE subject = ? AND slot = ?"
_DROP_ALL = "DELETE FROM rows WHERE subject = ?"
_ALL = "SELECT subject, slot, payload, sum FROM rows NOT INDEXED ORDER BY id"


class JournalError(RouterError):
    """The journal cannot be read or written; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Row:
    """Fact about a subject, in a named slot. Without payload it deletes the slot; without slot too, all."""

    subject: str
    slot: str = ""
    payload: bytes | None = None

    @property
    def is_optional(self) -> bool:
        """Return whether losing the row would only leave old counts or ends of prompts after a restart."""
        return self.payload is not None and (self.slot == TURNS or self.slot.startswith(NODE))


def checksum(subject: str, slot: str, payload: bytes) -> int:
    """Return the checksum of a row, signed because SQLite has no unsigned integers."""
    return xxh3_64_intdigest(f"{subject}\0{slot}\0".encode() + payload) - (1 << 63)


class Journal:
    """Journal file opened for writing. No second process can open it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Row] = []
        self._flushing: asyncio.Task[None] | None = None
        self._lazy: asyncio.TimerHandle | None = None  # starts the next flush that nobody waits for
        self._retry_s = _RETRY_S
        self._failed = ""  # why the last flush failed
        self._begun_at = self._reported_at = 0.0  # start of the current flush, and of the last late flush
        self._silent = f"{_CANNOT}: the disk has not answered for {LATE_S:g} s; fix the disk"
        path.parent.mkdir(parents=True, exist_ok=True)
        check(path)
        if not path.exists():  # new or moved away: transactions are numbered from the start
            _sequence_file(path).unlink(missing_ok=True)
        self._rows = sqlite3.connect(path, timeout=0.5, isolation_level=None, check_same_thread=False)
        try:
            self._sequence = self._prepare()
        except sqlite3.Error as wrong:
            self._rows.close()
            raise JournalError(_sentence(path, wrong)) from wrong
        self._sequence_file = os.open(_sequence_file(path), os.O_RDWR | os.O_CREAT, 0o644)

    @classmethod
    def create(cls, path: Path, rows: Iterable[Row]) -> None:
        """Create a new journal file that contains `rows`."""
        made = cls(path)
        try:
            made._write(list(rows))
        finally:
            made._end()

    def read(self) -> list[Row]:
        """Return all rows in the order in which they were written."""
        return [Row(*row[:3]) for row in self._rows.execute(_ALL) if _is_ours(row[0])]

    def take_term(self, at_least: int) -> int:
        """Choose a term greater than all that were taken from this file, write it, and return it.

        `at_least` is the time of the start, so that the term is also greater than those in other files.
        If the disk accepts no write, the file keeps its last term. No other directory can take a term from
        the file meanwhile.
        """
        row = self._rows.execute("SELECT payload FROM rows WHERE subject = ?", (_TERM,)).fetchone()
        term = max(at_least, int(row[0]) + 1 if row is not None else 0)
        with suppress(sqlite3.Error):
            self._write([Row(_TERM, _TERM, b"%d" % term)])
        return term

    def append(self, row: Row) -> None:
        """Queue a row. Raise an error for a row that can never be written and would block all later rows."""
        try:
            f"{row.subject}{row.slot}".encode()
        except UnicodeEncodeError as wrong:
            raise JournalError(f"{row.subject!r} {row.slot!r} is no text that a journal can hold") from wrong
        if row.is_optional and self._full:
            metrics.JOURNAL_ROWS_MISSED.inc()
            return
        self._pending.append(row)
        if self._lazy is None and self._flushing is None:
            self._lazy = asyncio.get_running_loop().call_later(_LAZY_S, self._start_flush)

    async def durable(self) -> None:
        """Wait until all rows appended so far are on disk. Raise JournalError while the disk refuses them."""
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
            if self._reported_at != self._begun_at:
                self._reported_at = self._begun_at
                metrics.JOURNAL_UNWRITTEN.set(len(self._pending))
                log.error("disk does not answer file=%s rows=%d", self._path, len(self._pending))
            raise JournalError(self._silent) from None

    def check_capacity(self) -> None:
        """Refuse new work while the disk accepts nothing and too many rows wait for it."""
        if self._full:
            raise JournalError(self.problem)

    @property
    def problem(self) -> str:
        """Return why the disk accepts no rows; an empty text if it accepts them."""
        now = asyncio.get_running_loop().time()
        late = self._flushing is not None and now >= self._begun_at + LATE_S
        return self._silent if late else self._failed

    @property
    def _full(self) -> bool:
        return len(self._pending) > MAX_UNWRITTEN and bool(self.problem)

    async def close(self) -> None:
        with suppress(JournalError):
            await self.durable()
        if self._lazy is not None:
            self._lazy.cancel()
        self._end()

    def _end(self) -> None:
        self._thread.shutdown(wait=True)
        self._rows.close()
        os.close(self._sequence_file)

    def _prepare(self) -> int:
        """Lock the file, create the table in a new file, and return the number of the last transaction."""
        execute = self._rows.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        if execute("PRAGMA user_version").fetchone() == (0,):
            self._rows.executescript(_SCHEMA)
        execute("BEGIN IMMEDIATE")
        execute("COMMIT")
        with suppress(sqlite3.OperationalError):  # a full disk is reported when something is written
            execute("PRAGMA wal_checkpoint(TRUNCATE)")  # leaves no torn end in front of new rows
        return _last_sequence(self._rows)

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
        except Exception as wrong:  # after any error the rows stay and are written again
            self._flushing = None
            self._failed = f"{_CANNOT}: {wrong}; free space or fix the disk"
            self._lazy = loop.call_later(self._retry_s, self._start_flush)
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            metrics.JOURNAL_UNWRITTEN.set(len(self._pending))
            log.error("cannot write file=%s rows=%d reason=%r", self._path, len(rows), str(wrong))
            raise JournalError(self._failed) from wrong
        del self._pending[: len(rows)]
        self._flushing, self._failed, self._retry_s = None, "", _RETRY_S
        metrics.JOURNAL_UNWRITTEN.set(0)
        self._start_flush()

    def _write(self, rows: list[Row]) -> None:
        sequence = self._sequence + 1
        self._rows.execute("BEGIN")
        try:
            for row in (*rows, Row(_SEQUENCE, _SEQUENCE, b"%d" % sequence)):
                self._execute(row)
            self._rows.execute("COMMIT")
        except Exception:
            if self._rows.in_transaction:
                self._rows.execute("ROLLBACK")
            raise
        self._sequence = sequence
        with suppress(OSError):  # with an older number, fewer missing transactions are noticed
            os.pwrite(self._sequence_file, 2 * (b"%0*d" % (_DIGITS, sequence)), 0)

    def _execute(self, row: Row) -> None:
        if row.payload is not None:
            sum_ = checksum(row.subject, row.slot, row.payload)
            self._rows.execute(_PUT, (row.subject, row.slot, row.payload, sum_))
        elif row.slot:
            self._rows.execute(_DROP, (row.subject, row.slot))
        else:
            self._rows.execute(_DROP_ALL, (row.subject,))


def _retrieve(flush: asyncio.Task[None]) -> None:
    """Mark a flush's exception as retrieved, because the log and the callers that waited have it."""
    if not flush.cancelled():
        flush.exception()


# Damage


def check(path: Path) -> None:
    """Raise JournalError if a directory cannot start with this file. Changes neither the file nor its log."""
    if not path.exists():
        return
    try:
        try:
            with closing(_read_only(path)) as opened:
                _check(path, opened)
        except sqlite3.OperationalError as wrong:
            if "I/O" not in str(wrong):
                raise
            _check_copy(path)
    except (sqlite3.Error, OSError) as wrong:
        raise JournalError(_sentence(path, wrong)) from wrong


def _check_copy(path: Path) -> None:
    """Check a copy of the journal: on a full disk, SQLite cannot write an index beside the file itself."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        for end in ("", "-wal"):
            if (file := path.with_name(path.name + end)).exists():
                shutil.copyfile(file, copy.with_name(file.name))
        with closing(_read_only(copy)) as opened:
            _check(path, opened)


def _check(path: Path, opened: sqlite3.Connection) -> None:
    (version,) = opened.execute("PRAGMA user_version").fetchone()
    if version not in (0, VERSION):
        raise JournalError(
            f"{path} is a journal of version {version}, and this is version {VERSION}: start the "
            "version of conserve that wrote it, or move the file away (its conversations begin anew)"
        )
    (found,) = opened.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise _damaged(path, found)
    rows = opened.execute(_ALL).fetchall() if version else []
    if bad := sum(not _is_whole(*row) for row in rows):
        raise _damaged(path, f"{bad} of {len(rows)} rows are not what was written")
    last, acknowledged = _last_sequence(opened) if version else 0, _acknowledged(path)
    if last + 1 < acknowledged:
        raise _damaged(path, f"its last {acknowledged - last} transactions are missing")
    if last < acknowledged:
        log.warning("last transaction lost file=%s sequence=%d", path, acknowledged)


def salvage(path: Path) -> tuple[list[Row], int]:
    """Read what a damaged journal still holds, from both ends of the table. Changes nothing.

    Returns the intact rows, and the number of damaged rows.
    """
    seen: dict[int, tuple[str, str, bytes, int]] = {}
    for order in ("", " DESC"):
        try:
            with closing(_read_only(path)) as opened:
                for id_, *row in opened.execute(_ALL.replace("SELECT", "SELECT id,") + order):
                    seen[id_] = tuple(row)
        except sqlite3.Error as wrong:
            if "locked" in str(wrong) or not path.exists():
                raise JournalError(_sentence(path, wrong)) from wrong
    whole = [Row(*row[:3]) for _, row in sorted(seen.items()) if _is_whole(*row)]
    return [row for row in whole if _is_ours(row.subject)], len(seen) - len(whole)


def replace(path: Path, rows: list[Row], suffix: str) -> Path:
    """Replace a damaged journal by a new one that contains `rows`; return the damaged file's new path."""
    new, kept = path.with_name(f"{path.name}.repaired"), path.with_name(f"{path.name}.{suffix}")
    new.unlink(missing_ok=True)
    Journal.create(new, rows)
    for end in ("-wal", "-sequence", ""):
        if (former := path.with_name(path.name + end)).exists():
            former.replace(kept.with_name(kept.name + end))
    _sequence_file(new).replace(_sequence_file(path))
    new.replace(path)
    return kept


def _read_only(path: Path) -> sqlite3.Connection:
    """Open a journal so that closing it again leaves SQLite's write-ahead log unchanged."""
    opened = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=0.5)
    opened.text_factory = lambda text: text.decode(errors="replace")
    return opened


def _is_whole(subject: str, slot: str, payload: bytes, written: int | None) -> bool:
    try:
        return written == checksum(subject, slot, payload)
    except (AttributeError, TypeError, UnicodeEncodeError):  # damage changed even a type
        return False


def _is_ours(subject: str) -> bool:
    return subject.startswith((CONVERSATION, ENGINE))


def _last_sequence(opened: sqlite3.Connection) -> int:
    row = opened.execute("SELECT payload FROM rows WHERE subject = ?", (_SEQUENCE,)).fetchone()
    return int(row[0]) if row is not None else 0


def _sequence_file(path: Path) -> Path:
    return path.with_name(f"{path.name}-sequence")


def _acknowledged(path: Path) -> int:
    """Return the number of the last transaction on disk; 0 if a power cut left the file empty.

    The file holds the number twice. A power cut can tear the write, and mix the digits of two numbers in one
    copy (09 and 10 become 19); the smaller copy is never greater than what was on disk.
    """
    try:
        text = _sequence_file(path).read_bytes().strip(b"\0")
        return min(int(text[:_DIGITS] or b"0"), int(text[_DIGITS:] or text or b"0"))
    except FileNotFoundError:
        return 0
    except ValueError:
        raise _damaged(path, f"{_sequence_file(path).name} does not hold a number") from None


def _damaged(path: Path, what: str) -> JournalError:
    return JournalError(
        f"{path} is damaged: {what}. `conserve journal repair {path}` says what is left of it, and keeps the "
        "damaged file"
    )


def _sentence(path: Path, wrong: Exception) -> str:
    if "locked" in str(wrong):
        return f"{path} is in use by another directory; stop that one first"
    if "malformed" in str(wrong):
        return str(_damaged(path, str(wrong)))
    if isinstance(wrong, OSError) or "full" in str(wrong) or "I/O" in str(wrong):
        return f"cannot write {path}: {wrong}; free space or fix the disk"
    return (
        f"this version cannot read the journal {path} ({wrong}). If it is damaged, `conserve journal repair "
        f"{path}` says what is left of it. If a version before 1 wrote it, it cannot be used. Move it away; "
        "its conversations begin anew"
    )
