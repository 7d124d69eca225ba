"""Store of answers of the Responses API: one SQLite file for the gateway processes of a machine.

An answer has two rows: what its request added to the prompt and what was answered (`contents`); the answer
before it, its bytes and when it was named (`answers`), so that no text is read or written where only that is
asked or changed. Of one that was deleted the latter stays: what goes on from it is told so. A conversation's
row outlives its answers, so that it does not begin again in silence. All is called in one thread
(`DiskThread`).
"""

import asyncio
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from router.errors import GatewayConfigError
from router.gateway.config import AnswersConfig
from router.gateway.responses.items import Pieces, ReadAnswer, inflated, without_brackets
from router.process import SteadyClock, Zero

Result = TypeVar("Result")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class DiskThread:
    """Thread for a disk that may hang: calls run one after another, and no wait for one is without a limit.

    It is a daemon: neither the end of the loop nor that of the process waits for a call that does not come
    back.
    """

    def __init__(self, name: str, longest_s: float) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._longest_s = longest_s
        self._begun_at: float | None = None  # the call under way
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def hangs(self) -> bool:
        begun_at = self._begun_at
        return begun_at is not None and time.monotonic() - begun_at > self._longest_s

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """TimeoutError where it does not come back in time; at once where one before it has not."""
        if self.hangs:
            raise TimeoutError
        async with asyncio.timeout(self._longest_s):
            return await self.submit(function, *arguments)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> asyncio.Future[Result]:
        """One that is cancelled before its turn is not called."""
        job: Future[Result] = Future()
        self._jobs.put((job, function, arguments))
        return asyncio.wrap_future(job)

    async def close(self, last: Callable[[], None]) -> None:
        """After what was asked before, and `last`. TimeoutError where that takes too long."""
        ending = asyncio.ensure_future(self.run(last))
        await asyncio.sleep(0)  # now it is asked
        self._jobs.put(None)
        await ending

    def _serve(self) -> None:
        while (asked := self._jobs.get()) is not None:
            job, function, arguments = asked
            if job.set_running_or_notify_cancel():
                self._begun_at = time.monotonic()
                try:
                    job.set_result(function(*arguments))
                except BaseException as wrong:  # noqa: BLE001  whoever waits for it is told
                    job.set_exception(wrong)
                self._begun_at = None
            del asked, job, function, arguments  # what they hold, until the next one comes


PRUNE_S = 30.0
LOCKED_S = 5.0  # another process writes
VERSION = 3
MOST_CONVERSATIONS = 500_000  # of all owners, whose newest answer is known: some 150 bytes each
_TURNS_LAST_S = 24 * 3600.0  # at most: how long a deletion is known, for the turns that it found under way
_DELETED_BYTES = 256  # that the row of a deleted answer counts for
_FROM: Mapping[int, tuple[str, ...]] = {
    0: (  # a new file; some files of before there were versions have the first three
        """CREATE TABLE IF NOT EXISTS answers (
            owner TEXT, id TEXT, previous TEXT, added BLOB, response BLOB, bytes INTEGER, used_at REAL,
            PRIMARY KEY (owner, id)) WITHOUT ROWID""",
        "CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_at, bytes)",
        """CREATE TABLE IF NOT EXISTS conversations (
            owner TEXT, id TEXT, newest TEXT, used_at REAL, PRIMARY KEY (owner, id)) WITHOUT ROWID""",
        "CREATE TABLE clock (id INTEGER PRIMARY KEY, boot TEXT, zero REAL)",
    ),
    1: (  # texts stay where they are, with columns that mean nothing any more: copying them may take a GiB
        "DROP INDEX answers_by_use",
        "ALTER TABLE answers RENAME TO contents",
        """CREATE TABLE answers (
            owner TEXT, id TEXT, previous TEXT, deleted INTEGER, bytes INTEGER, prompt_bytes INTEGER,
            used_at REAL, PRIMARY KEY (owner, id)) WITHOUT ROWID""",
        "INSERT INTO answers SELECT owner, id, previous, 0, bytes, NULL, used_at FROM contents",
        "CREATE INDEX answers_by_use ON answers (used_at, bytes)",
    ),
    2: (  # a table of its own: a gateway of before may still write to the others
        """CREATE TABLE deletions (
            owner TEXT, id TEXT, at REAL, PRIMARY KEY (owner, id)) WITHOUT ROWID""",
    ),
}
# Newest first, until it is clear that nothing goes on from here. Bytes that nobody counted are of version 1.
_BYTES = """coalesce(a.prompt_bytes, (SELECT inflated_bytes(added) FROM contents c
    WHERE c.owner = a.owner AND c.id = a.id), 0)"""
_CHAIN = f"""WITH RECURSIVE chain (id, previous, deleted, number, bytes, total) AS (
    SELECT id, previous, deleted, 1, {_BYTES}, {_BYTES} FROM answers a WHERE owner = :owner AND id = :id
    UNION ALL
    SELECT a.id, a.previous, a.deleted, number + 1, {_BYTES}, total + {_BYTES}
    FROM chain n CROSS JOIN answers a ON a.owner = :owner AND a.id = n.previous
    WHERE NOT n.deleted AND number <= :answers AND total <= :bytes)
    SELECT id, previous, deleted, bytes, total FROM chain ORDER BY number DESC"""


class ChainEnd(StrEnum):
    """Why a history is whole, or is not."""

    BEGINNING = "beginning"
    UNKNOWN = "unknown"  # nobody stored that answer
    DELETED = "deleted"  # one of its answers was
    GONE = "gone"  # its beginning was stored too long ago
    TOO_MANY = "too_many"  # answers
    TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True)
class StoredChain:
    """The answers from the beginning of a history to the one that was named, with their bytes in a prompt."""

    end: ChainEnd
    answers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredConversation:
    newest: str | None = None  # its last answer that was stored; None: it begins
    deleted_at: float = 0.0  # as far as a turn may be under way that began before


class AnswerStore:
    def __init__(self, config: AnswersConfig, clock: SteadyClock) -> None:
        self._config, self._clock = config, clock
        self._opened: sqlite3.Connection | None = None
        self._pruned_at = 0.0

    def open(self) -> sqlite3.Connection:
        """Refuses a file of a newer version; what else it raises may be otherwise the next time."""
        if self._opened is None:
            name = self._config.path or ":memory:"
            if self._config.path:
                path = Path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(0o600)
            database = sqlite3.connect(name, LOCKED_S, isolation_level=None, check_same_thread=False)
            try:
                database.create_function("inflated_bytes", 1, _inflated_bytes, deterministic=True)
                database.execute("PRAGMA journal_mode = WAL")
                with database:
                    database.execute("BEGIN IMMEDIATE")  # other gateway processes start, too
                    self._prepare(database)
            except BaseException:
                database.close()
                raise
            self._opened = database
        return self._opened

    def _prepare(self, database: sqlite3.Connection) -> None:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise GatewayConfigError(
                f"{self._config.path} has stored answers of version {version}, and this conserve knows "
                f"{VERSION}: start the version that wrote it, or move the file away"
            )
        for step in range(version, VERSION):
            for statement in _FROM[step]:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {VERSION}")
        row = database.execute("SELECT boot, zero FROM clock").fetchone()
        (newest,) = database.execute("SELECT max(used_at) FROM answers").fetchone()
        zero = self._clock.resume(Zero(*row) if row is not None else None, newest or 0.0)
        database.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (zero.boot, zero.at))

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def chain(self, owner: str, name: str, most_answers: int, most_bytes: int) -> StoredChain:
        """Without a text being read, but for the bytes of those that an earlier version stored."""
        asked = {"owner": owner, "id": name, "answers": most_answers, "bytes": most_bytes}
        rows = self.open().execute(_CHAIN, asked).fetchall()
        if not rows:
            return StoredChain(ChainEnd.UNKNOWN)
        _, previous, deleted, _, total = rows[0]
        if deleted:
            return StoredChain(ChainEnd.DELETED)
        if total > most_bytes:
            return StoredChain(ChainEnd.TOO_LARGE)
        if len(rows) > most_answers:
            return StoredChain(ChainEnd.TOO_MANY)
        if previous is not None:
            return StoredChain(ChainEnd.GONE)
        return StoredChain(ChainEnd.BEGINNING, tuple((row[0], row[3]) for row in rows))

    def items(self, owner: str, names: Iterable[str]) -> tuple[bytes, ...] | None:
        """Of these answers and their requests, in pieces; None: one has gone since."""
        asked, found = "SELECT added FROM contents WHERE owner = ? AND id = ?", Pieces()
        for name in names:
            row = self.open().execute(asked, (owner, name)).fetchone()
            if row is None:
                return None
            found.add(without_brackets(inflated(row[0])))
        return found.all

    def conversation(self, owner: str, name: str) -> StoredConversation:
        asked = """SELECT (SELECT newest FROM conversations WHERE owner = :owner AND id = :id),
            coalesce((SELECT at FROM deletions WHERE owner = :owner AND id = :id), 0.0)"""
        return StoredConversation(*self.open().execute(asked, {"owner": owner, "id": name}).fetchone())

    def used(self, owner: str, conversation: str | None, names: Iterable[str]) -> None:
        """They were named: their time begins anew."""
        now, database = self._clock(), self.open()
        with database:
            database.execute("BEGIN IMMEDIATE")
            uses = [(now, owner, name) for name in names]
            database.executemany("UPDATE answers SET used_at = ? WHERE owner = ? AND id = ?", uses)
            touched = "UPDATE conversations SET used_at = ? WHERE owner = ? AND id = ?"
            database.execute(touched, (now, owner, conversation))

    def keep(
        self,
        owner: str,
        previous: str | None,
        conversation: str | None,
        asked: tuple[bytes, ...],
        answer: ReadAnswer,
        deleted_at: float = 0.0,
    ) -> None:
        """`deleted_at`: of the conversation when the turn began; one since then takes the turn out of it."""
        whole, now, database = Pieces(), self._clock(), self.open()
        whole.add(asked)
        whole.add((answer.items,) if answer.items else ())
        items = b"".join(whole.all)
        added = zlib.compress(b"[" + items + b"]", 1)
        size = len(added) + len(answer.shown)
        row = owner, answer.id, previous, 0, size, len(items), now
        texts = owner, answer.id, added, answer.shown
        with database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            put = "INSERT OR REPLACE INTO contents (owner, id, added, response) VALUES (?, ?, ?, ?)"
            database.execute(put, texts)
            if conversation is not None:
                newest = owner, conversation, answer.id, now
                if self.conversation(owner, conversation).deleted_at in (0.0, deleted_at):
                    database.execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?)", newest)

    def prune(self) -> int:
        """How many went: for their age, or beyond the bytes that may be stored."""
        now = self._clock()
        if now - self._pruned_at < PRUNE_S:
            return 0
        self._pruned_at = now
        database, old = self.open(), now - self._config.keep_s
        oldest = _beyond(database, "answers", "bytes", self._config.max_bytes)
        forgotten = _beyond(database, "conversations", "1", MOST_CONVERSATIONS)
        with database:
            database.execute("BEGIN IMMEDIATE")
            gone = self._drop(database, "used_at <= ?", old)
            for owner, used_at in oldest:
                gone += self._drop(database, "owner = ? AND used_at <= ?", owner, used_at)
            database.executemany("DELETE FROM conversations WHERE owner = ? AND used_at <= ?", forgotten)
            database.execute("DELETE FROM deletions WHERE at <= ?", (now - _TURNS_LAST_S,))
        return gone

    @staticmethod
    def _drop(database: sqlite3.Connection, which: str, *values: Any) -> int:
        """Answers that `which` says; returns how many."""
        those = f"SELECT owner, id FROM answers WHERE {which}"
        database.execute(f"DELETE FROM contents WHERE (owner, id) IN ({those})", values)
        return database.execute(f"DELETE FROM answers WHERE {which}", values).rowcount

    def find(self, owner: str, name: str) -> bytes | None:
        asked = "SELECT response FROM contents WHERE owner = ? AND id = ?"
        row = self.open().execute(asked, (owner, name)).fetchone()
        return zlib.decompress(row[0]) if row is not None else None

    def forget(self, owner: str, name: str) -> bool:
        """Its text; that it was deleted is known as long as an answer is kept."""
        database = self.open()
        with database:
            database.execute("BEGIN IMMEDIATE")
            gone = "DELETE FROM contents WHERE owner = ? AND id = ?"
            was = bool(database.execute(gone, (owner, name)).rowcount)
            mark = """UPDATE answers SET deleted = 1, bytes = ?, prompt_bytes = 0, used_at = ?
                WHERE owner = ? AND id = ?"""
            database.execute(mark, (_DELETED_BYTES, self._clock(), owner, name))
        return was

    def leave(self, owner: str, conversation: str, live: bool) -> bool:
        """Whether it had a history. `live`: the directory knew it: its first turn may be under way."""
        database = self.open()
        with database:
            database.execute("BEGIN IMMEDIATE")
            had = self.conversation(owner, conversation)
            if live or had.newest is not None:
                gone = "DELETE FROM conversations WHERE owner = ? AND id = ?"
                database.execute(gone, (owner, conversation))
                at = max(self._clock(), had.deleted_at + 1e-3)  # no two are alike
                database.execute(
                    "INSERT OR REPLACE INTO deletions VALUES (?, ?, ?)", (owner, conversation, at)
                )
        return had.newest is not None


def _beyond(database: sqlite3.Connection, table: str, size: str, most: int) -> list[tuple[str, float]]:
    """Owners with more than their share of `most`, and when the newest of what is over was used."""
    totals = dict(database.execute(f"SELECT owner, sum({size}) FROM {table} GROUP BY owner").fetchall())
    level = fair_share(totals.values(), most)
    over = f"""SELECT used_at FROM (SELECT used_at, sum({size}) OVER (ORDER BY used_at DESC, {size}) AS total
        FROM {table} WHERE owner = ?) WHERE total > ? ORDER BY used_at DESC LIMIT 1"""
    return [
        (owner, row[0])
        for owner, total in totals.items()
        if total > level and (row := database.execute(over, (owner, level)).fetchone()) is not None
    ]  # None: another gateway process has pruned meanwhile


def fair_share(totals: Iterable[int], most: int) -> int:
    """What each may keep so that all fits: who has less keeps it, and leaves the rest to the others."""
    left, waiting = most, sorted(totals)
    while waiting and waiting[0] <= left // len(waiting):
        left -= waiting.pop(0)
    return left // len(waiting) if waiting else most


def _inflated_bytes(data: bytes) -> int:
    return sum(map(len, inflated(data)))
