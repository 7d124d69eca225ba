"""SQLite table of stored answers, one row per answer, shared by the gateway processes of a machine.

A row has what an answer adds to the prompt (its request's items and its own) and the response object. An
answer that expired or was deleted loses both and stays as a tombstone, so that a request that continues from
it learns the reason and does not silently begin a new history. The end of a conversation is a tombstone, too.
All methods block: call them in a thread.
"""

import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from router.errors import GatewayConfigError, RouterError
from router.gateway.config import AnswersConfig

PRUNE_S = 30.0
LOCKED_S = 5.0  # longest wait for another process that writes
VERSION = 4
MOST_TOMBSTONES = 500_000
TOMBSTONES_LAST_S = 30 * 24 * 3600.0
PIECE_BYTES = 1 << 20
_SCHEMA = """
    DROP TABLE IF EXISTS answers; DROP TABLE IF EXISTS contents; DROP TABLE IF EXISTS conversations;
    DROP TABLE IF EXISTS deletions; DROP TABLE IF EXISTS clock;
    CREATE TABLE stored_answers (
        number INTEGER PRIMARY KEY, owner TEXT, id TEXT, previous TEXT, conversation TEXT,
        items BLOB, response BLOB, prompt_bytes INTEGER, bytes INTEGER, used_at REAL, gone TEXT,
        UNIQUE (owner, id));
    CREATE INDEX answers_by_conversation ON stored_answers (owner, conversation, number)
        WHERE conversation IS NOT NULL;
    CREATE INDEX answers_by_use ON stored_answers (gone, used_at);"""
# Walks a history from its newest answer back, until a limit is exceeded or an answer is gone.
_CHAIN = """WITH RECURSIVE chain (id, previous, gone, number, total) AS (
    SELECT id, previous, gone, 1, prompt_bytes FROM stored_answers WHERE owner = :owner AND id = :id
    UNION ALL
    SELECT a.id, a.previous, a.gone, c.number + 1, c.total + a.prompt_bytes
    FROM chain c CROSS JOIN stored_answers a ON a.owner = :owner AND a.id = c.previous
    WHERE c.gone IS NULL AND c.number <= :answers AND c.total <= :bytes)
    SELECT id, previous, gone, total FROM chain ORDER BY number DESC"""
_BURY = "UPDATE stored_answers SET gone = ?, items = NULL, response = NULL, prompt_bytes = 0, bytes = 0"


class Missing(StrEnum):
    """Reason why a history cannot be continued; `deleted` and `expired` are stored in tombstones."""

    DELETED = "deleted"
    EXPIRED = "expired"
    UNKNOWN = "unknown"
    TOO_MANY = "too_many"  # answers
    TOO_LARGE = "too_large"


class HistoryMissing(RouterError):
    """Raised for a history that cannot be continued."""

    def __init__(self, reason: Missing) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """One answer of the Responses API, as it is stored."""

    id: str
    previous: str | None  # id of the answer before it
    items: bytes  # items of request and answer, with commas between them
    response: bytes
    conversation: str | None = None
    conversation_end: int = 0  # number of the conversation's last end when the turn began


class AnswerStore:
    """Stores answers for `keep_s` after their last use, within each owner's share of `max_bytes`."""

    def __init__(self, config: AnswersConfig, clock: Callable[[], float] = time.time) -> None:
        self._config, self._clock = config, clock
        self._opened: sqlite3.Connection | None = None
        self._pruned_at = 0.0

    def open(self) -> sqlite3.Connection:
        """Return the connection; the first call opens it.

        Raises GatewayConfigError if a newer version wrote the file. After other errors a later call may work.
        """
        if self._opened is None:
            if self._config.path:
                path = Path(self._config.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(0o600)
            name = self._config.path or ":memory:"
            database = sqlite3.connect(name, LOCKED_S, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(database)
            except BaseException:
                database.close()
                raise
            self._opened = database
        return self._opened

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        with database:
            database.execute("BEGIN IMMEDIATE")  # other gateway processes start at the same time
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise GatewayConfigError(
                    f"{self._config.path} has stored answers of version {version}, and this conserve knows "
                    f"{VERSION}: start the version that wrote it, or move the file away"
                )
            if version < VERSION:
                for statement in _SCHEMA.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        database = self.open()
        with database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    def put(self, owner: str, answer: StoredAnswer) -> None:
        """Store an answer; if its conversation ended during its turn, store it outside the conversation."""
        items, response = zlib.compress(answer.items, 1), zlib.compress(answer.response, 1)
        sizes = len(answer.items), len(items) + len(response)
        with self._writing() as database:
            conversation = answer.conversation
            if conversation and self._conversation_end(owner, conversation) != answer.conversation_end:
                conversation = None
            row = owner, answer.id, answer.previous, conversation, items, response, *sizes, self._clock()
            columns = "owner, id, previous, conversation, items, response, prompt_bytes, bytes, used_at"
            marks = ", ".join("?" * len(row))
            database.execute(f"INSERT OR REPLACE INTO stored_answers ({columns}) VALUES ({marks})", row)

    def response(self, owner: str, name: str) -> bytes | None:
        """Return the response object of an answer, or None if the answer is not stored."""
        query = "SELECT response FROM stored_answers WHERE owner = ? AND id = ? AND gone IS NULL"
        row = self.open().execute(query, (owner, name)).fetchone()
        return zlib.decompress(row[0]) if row is not None else None

    def delete(self, owner: str, name: str) -> bool:
        """Delete an answer, and return whether it was stored."""
        with self._writing() as database:
            where = "WHERE owner = ? AND id = ? AND gone IS NULL"
            return bool(database.execute(f"{_BURY} {where}", (Missing.DELETED, owner, name)).rowcount)

    def history(self, owner: str, name: str, most_answers: int, most_bytes: int) -> tuple[bytes, ...]:
        """Return the items of the history that ends with the answer `name`, in pieces.

        Raises HistoryMissing. The size of a history is checked before any of its items is read.
        """
        query = {"owner": owner, "id": name, "answers": most_answers, "bytes": most_bytes}
        rows = self.open().execute(_CHAIN, query).fetchall()
        if not rows:
            raise HistoryMissing(Missing.UNKNOWN)
        _, previous, gone, total = rows[0]
        if gone:
            raise HistoryMissing(Missing(gone))
        if total > most_bytes:
            raise HistoryMissing(Missing.TOO_LARGE)
        if len(rows) > most_answers:
            raise HistoryMissing(Missing.TOO_MANY)
        if previous is not None:
            raise HistoryMissing(Missing.EXPIRED)
        return tuple(_pieces(self._items(owner, row[0]) for row in rows))

    def _items(self, owner: str, name: str) -> bytes:
        query = "SELECT items FROM stored_answers WHERE owner = ? AND id = ? AND gone IS NULL"
        row = self.open().execute(query, (owner, name)).fetchone()
        if row is None:
            raise HistoryMissing(Missing.DELETED)
        return zlib.decompress(row[0])

    def touch(self, owner: str, name: str) -> None:
        """Restart the lifetime of all answers in the history that ends with the answer `name`."""
        query = {"owner": owner, "id": name, "answers": 1 << 20, "bytes": 1 << 40}
        with self._writing() as database:
            names = [(self._clock(), owner, row[0]) for row in database.execute(_CHAIN, query)]
            database.executemany(
                "UPDATE stored_answers SET used_at = ? WHERE owner = ? AND id = ? AND gone IS NULL", names
            )

    def newest(self, owner: str, conversation: str) -> tuple[str | None, int]:
        """Return the id of a conversation's newest answer, or None, and the number of its last end.

        The number grows each time that a conversation of this name ends; before the first end it is 0.
        """
        query = """SELECT id FROM stored_answers WHERE owner = ? AND conversation = ?
            ORDER BY number DESC LIMIT 1"""
        row = self.open().execute(query, (owner, conversation)).fetchone()
        return row[0] if row is not None else None, self._conversation_end(owner, conversation)

    def _conversation_end(self, owner: str, conversation: str) -> int:
        query = "SELECT number FROM stored_answers WHERE owner = ? AND id = ?"
        row = self.open().execute(query, (owner, _end_of(conversation))).fetchone()
        return int(row[0]) if row is not None else 0

    def end_conversation(self, owner: str, conversation: str, live: bool) -> bool:
        """End a conversation: the next turn starts a new one, which gets no answers of running turns.

        Returns whether it had stored answers. `live`: a turn may be running, even if nothing is stored yet.
        """
        with self._writing() as database:
            left = "UPDATE stored_answers SET conversation = NULL WHERE owner = ? AND conversation = ?"
            had = bool(database.execute(left, (owner, conversation)).rowcount)
            if live or had:
                row = owner, _end_of(conversation), self._clock(), Missing.DELETED
                columns = "owner, id, used_at, gone, prompt_bytes, bytes"
                database.execute(
                    f"INSERT OR REPLACE INTO stored_answers ({columns}) VALUES (?, ?, ?, ?, 0, 0)", row
                )
        return had

    def prune(self) -> int:
        """Delete answers that are too old or beyond their owners' shares; return how many."""
        now = self._clock()
        if now - self._pruned_at < PRUNE_S:
            return 0
        self._pruned_at = now
        with self._writing() as database:
            old = (Missing.EXPIRED, now - self._config.keep_s)
            expired = database.execute(f"{_BURY} WHERE gone IS NULL AND used_at <= ?", old).rowcount
            totals = dict(
                database.execute(
                    "SELECT owner, sum(bytes) FROM stored_answers WHERE gone IS NULL GROUP BY owner"
                ).fetchall()
            )
            share = fair_share(totals.values(), self._config.max_bytes)
            for owner in [owner for owner, total in totals.items() if total > share]:
                over = """WHERE number IN (SELECT number FROM (SELECT number, sum(bytes)
                    OVER (ORDER BY used_at DESC, number DESC) AS total
                    FROM stored_answers WHERE owner = ? AND gone IS NULL) WHERE total > ?)"""
                expired += database.execute(f"{_BURY} {over}", (Missing.EXPIRED, owner, share)).rowcount
            database.execute(
                """DELETE FROM stored_answers WHERE gone IS NOT NULL AND (used_at <= ? OR number <=
                (SELECT number FROM stored_answers WHERE gone IS NOT NULL
                ORDER BY number DESC LIMIT 1 OFFSET ?))""",
                (now - self._config.keep_s - TOMBSTONES_LAST_S, MOST_TOMBSTONES),
            )
        return expired


def _end_of(conversation: str) -> str:
    return f"end of {conversation}"  # no response's id: it has spaces


def _pieces(answers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the items of answers, joined with commas. Only the last piece is shorter than `PIECE_BYTES`."""
    joined = bytearray()
    for number, items in enumerate(answer for answer in answers if answer):
        for at in range(0, len(items), PIECE_BYTES):
            joined += b"," if number and not at else b""
            joined += items[at : at + PIECE_BYTES]
            if len(joined) >= PIECE_BYTES:
                yield bytes(joined)
                joined.clear()
    if joined:
        yield bytes(joined)


def fair_share(totals: Iterable[int], most: int) -> int:
    """Return how many bytes each owner may keep, so that together they keep at most `most`.

    `totals` has the bytes of each owner. Owners below their share leave the rest to the larger ones.
    """
    left, waiting = most, sorted(totals)
    while waiting and waiting[0] <= left // len(waiting):
        left -= waiting.pop(0)
    return left // len(waiting) if waiting else most
