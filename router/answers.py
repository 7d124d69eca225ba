"""Stored answers of the Responses API, so that a decoder's end costs KV and not history.

A row is one answer: what its request added to the prompt and what was answered, the answer before it, and the
response itself; of a `conversation`, which its newest answer is. A request that names either goes to engines
with its whole input, like any other; engines store nothing. One SQLite file serves the gateway processes of a
machine; each has one thread that writes and reads it. What nobody named for `keep_s` goes, and the oldest
beyond `max_bytes`.
"""

import asyncio
import logging
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from router import metrics
from router.clocks import SteadyClock, Zero
from router.config import AnswersConfig
from router.errors import BadIdentity, BadRequest, GatewayConfigError, Unavailable
from router.http import RawHeaders, StreamObserver
from router.identity import named_conversation
from router.refusals import no_such_response

log = logging.getLogger("conserve.router.answers")

MOST_BYTES = 16 << 20  # of one answer, or of a request that is kept with it
LONGEST_HISTORY = 1_000  # answers
MOST_WAITING_BYTES = 256 << 20  # of answers that are not written yet
PRUNE_S = 30.0
_LOCKED_S = 5.0  # another process writes
_LATE_S, _TRIES = 0.05, 10  # an answer that another process is about to write
_ENDS = (b"event: response.completed", b"event: response.incomplete")
VERSION = 1
_SCHEMA = (  # a file of version 0 has some of the first three
    """CREATE TABLE IF NOT EXISTS answers (
        owner TEXT, id TEXT, previous TEXT, added BLOB, response BLOB, bytes INTEGER, used_at REAL,
        PRIMARY KEY (owner, id)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS answers_by_use ON answers (used_at, bytes)",
    """CREATE TABLE IF NOT EXISTS conversations (
        owner TEXT, id TEXT, newest TEXT, used_at REAL, PRIMARY KEY (owner, id)) WITHOUT ROWID""",
    "CREATE TABLE clock (id INTEGER PRIMARY KEY, boot TEXT, zero REAL)",
    f"PRAGMA user_version = {VERSION}",
)
_CHAIN = f"""WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 1 FROM answers WHERE owner = :owner AND id = :id
    UNION ALL SELECT a.id, a.previous, depth + 1 FROM answers a JOIN chain c ON a.id = c.previous
    WHERE a.owner = :owner AND depth < {LONGEST_HISTORY})
    SELECT a.id, a.previous, a.added FROM chain c JOIN answers a ON a.owner = :owner AND a.id = c.id
    ORDER BY depth DESC"""

Result = TypeVar("Result")


SAYS = b"x-response-says"  # to engines: fields of the answer, where its history is not theirs


@dataclass(frozen=True, slots=True)
class History:
    """Where a request's answer stands."""

    pieces: tuple[bytes, ...]  # the request, as it came
    previous: str | None  # the answer before it
    conversation: str | None
    kept: bool  # with its answer, once that is there

    @property
    def said(self) -> dict[str, Any]:
        """By the answer."""
        if self.conversation is not None:
            return {"previous_response_id": None, "conversation": {"id": self.conversation}}
        return {"previous_response_id": self.previous}

    @property
    def headers(self) -> RawHeaders:
        return [(SAYS, orjson.dumps(self.said))] if self.previous or self.conversation else []


class AnswerObserver(StreamObserver):
    """Also keeps the response object that an answer is, or ends with."""

    __slots__ = ("_kept", "_kept_bytes")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self._kept or not self.streamed or any(end in data for end in _ENDS):
            self._kept_bytes += len(data)
            self._kept.append(data if self._kept_bytes <= MOST_BYTES else b"")

    @property
    def response(self) -> bytes:
        """JSON of it, or of the event that has it; empty when there is none, or too much of it."""
        kept = b"".join(self._kept) if self._kept_bytes <= MOST_BYTES else b""
        if not self.streamed:
            return kept
        at = max(kept.find(end) for end in _ENDS)
        return kept[at:].partition(b"data: ")[2].partition(b"\n")[0]


class Answers:
    def __init__(self, config: AnswersConfig, clock: SteadyClock | None = None) -> None:
        self._config, self._clock = config, clock or SteadyClock()
        self._thread = ThreadPoolExecutor(1, "answers")
        self._database: sqlite3.Connection | None = None
        self._pruned_at = 0.0
        self._waiting_bytes = 0  # of answers that are not written yet

    async def start(self) -> None:
        """Refuses a file of a newer version. One that cannot be opened is tried again when it is needed."""
        with suppress(Unavailable):
            await self._run(self._open)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def with_history(
        self, owner: str, pieces: tuple[bytes, ...], body: Mapping[str, Any]
    ) -> tuple[dict[str, Any], History]:
        """Fields for the engine in place of the client's, and what to keep. 404: it is not the owner's."""
        previous, conversation = body.get("previous_response_id") or None, named_conversation(body)
        if previous is not None and not isinstance(previous, str):
            raise BadIdentity("previous_response_id must be a string")
        if previous and conversation:
            text = "previous_response_id and conversation each bring a history: send one of them"
            raise BadRequest(text, param="conversation")
        if conversation:
            previous = await self._run(self._newest, owner, conversation)
        fields: dict[str, Any] = {"store": False}
        if previous:
            whole = await self._run(self._whole_input, owner, previous, pieces)
            for _ in range(_TRIES):
                if whole is not None:
                    break
                await asyncio.sleep(_LATE_S)
                whole = await self._run(self._whole_input, owner, previous, pieces)
            if whole is None:
                raise no_such_response()
            fields |= {"input": orjson.Fragment(whole), "previous_response_id": None}
        kept = body.get("store") is not False and sum(map(len, pieces)) <= MOST_BYTES
        return fields, History(pieces, previous, conversation, kept)

    def keep(self, owner: str, kept: History, response: bytes) -> None:
        """In the thread, soon; what is asked of it afterwards finds it. Not where too much waits for it."""
        size = sum(map(len, kept.pieces)) + len(response)
        if not response:
            return
        if self._waiting_bytes + size > MOST_WAITING_BYTES:
            metrics.ANSWERS.labels("failed").inc()
            log.warning("an answer is not stored: the disk is slow waiting_bytes=%d", self._waiting_bytes)
            return
        self._waiting_bytes += size
        keeping = asyncio.get_running_loop().run_in_executor(self._thread, self._keep, owner, kept, response)
        keeping.add_done_callback(lambda _: self._written(size))

    def _written(self, size: int) -> None:
        self._waiting_bytes -= size

    async def find(self, owner: str, name: str) -> bytes | None:
        return await self._run(self._find, owner, name)

    async def forget(self, owner: str, name: str) -> bool:
        return await self._run(self._forget, owner, name)

    async def leave(self, owner: str, conversation: str) -> bool:
        """What it is called next has no history."""
        return await self._run(self._leave, owner, conversation)

    async def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *arguments)
        except sqlite3.Error as wrong:
            log.warning("stored answers cannot be read reason=%r", wrong)
            metrics.ANSWERS.labels("failed").inc()
            raise Unavailable("stored answers cannot be read now; try again", retry_after_s=1.0) from wrong

    # In the thread

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            name = self._config.path or ":memory:"
            if self._config.path:
                path = Path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(0o600)
            database = sqlite3.connect(name, _LOCKED_S, isolation_level=None, check_same_thread=False)
            try:
                database.execute("PRAGMA journal_mode = WAL")
                with database:
                    database.execute("BEGIN IMMEDIATE")  # other gateway processes start, too
                    self._prepare(database)
            except BaseException:
                database.close()
                raise
            self._database = database
        return self._database

    def _prepare(self, database: sqlite3.Connection) -> None:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise GatewayConfigError(
                f"{self._config.path} has stored answers of version {version}, and this conserve knows "
                f"{VERSION}: start the version that wrote it, or move the file away"
            )
        if version == 0:
            for statement in _SCHEMA:
                database.execute(statement)
        row = database.execute("SELECT boot, zero FROM clock").fetchone()
        (newest,) = database.execute("SELECT max(used_at) FROM answers").fetchone()
        zero = self._clock.resume(Zero(*row) if row is not None else None, newest or 0.0)
        database.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?)", (zero.boot, zero.at))

    def _whole_input(self, owner: str, previous: str, pieces: Sequence[bytes]) -> bytes | None:
        database = self._open()
        rows = database.execute(_CHAIN, {"owner": owner, "id": previous}).fetchall()
        if not rows or rows[0][1] is not None:  # one before it is gone
            return None
        now = self._clock()
        uses = [(now, owner, row[0]) for row in rows]
        database.executemany("UPDATE answers SET used_at = ? WHERE owner = ? AND id = ?", uses)
        own = orjson.dumps(_items(orjson.loads(b"".join(pieces)).get("input")))
        lists = [*(zlib.decompress(row[2]) for row in rows), own]
        return b"[" + b",".join(one[1:-1] for one in lists if len(one) > 2) + b"]"

    def _newest(self, owner: str, conversation: str) -> str | None:
        """The last answer of it that was stored; None: this is the first."""
        named, database = (owner, conversation), self._open()
        touched = "UPDATE conversations SET used_at = ? WHERE owner = ? AND id = ? RETURNING newest"
        row = database.execute(touched, (self._clock(), *named)).fetchone()
        return str(row[0]) if row is not None else None

    def _leave(self, owner: str, conversation: str) -> bool:
        gone = "DELETE FROM conversations WHERE owner = ? AND id = ?"
        return bool(self._open().execute(gone, (owner, conversation)).rowcount)

    def _keep(self, owner: str, kept: History, response: bytes) -> None:
        try:
            answer = orjson.loads(response)
            answer = answer.get("response", answer)
            answer |= {**kept.said, "store": True}
            asked = _items(orjson.loads(b"".join(kept.pieces)).get("input"))
            added = zlib.compress(orjson.dumps([*asked, *map(_as_input, answer["output"])]), 1)
            shown = zlib.compress(orjson.dumps(answer), 1)
            row = owner, answer["id"], kept.previous, added, shown, len(added) + len(shown), self._clock()
            self._open().execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            if kept.conversation is not None:
                newest = owner, kept.conversation, answer["id"], self._clock()
                self._open().execute("INSERT OR REPLACE INTO conversations VALUES (?, ?, ?, ?)", newest)
            metrics.ANSWERS.labels("kept").inc()
            self._prune()
        except (sqlite3.Error, orjson.JSONDecodeError, KeyError, TypeError) as wrong:
            metrics.ANSWERS.labels("failed").inc()
            log.warning("an answer could not be stored reason=%r", wrong)

    def _prune(self) -> None:
        now = self._clock()
        if now - self._pruned_at < PRUNE_S:
            return
        self._pruned_at = now
        database = self._open()
        old = now - self._config.keep_s
        over = """SELECT used_at FROM (SELECT used_at, sum(bytes) OVER (ORDER BY used_at DESC, bytes) AS total
            FROM answers) WHERE total > ? ORDER BY used_at DESC LIMIT 1"""
        if (row := database.execute(over, (self._config.max_bytes,)).fetchone()) is not None:
            old = max(old, row[0])
        gone = database.execute("DELETE FROM answers WHERE used_at <= ?", (old,)).rowcount
        database.execute("DELETE FROM conversations WHERE used_at <= ?", (old,))
        metrics.ANSWERS.labels("pruned").inc(gone)

    def _find(self, owner: str, name: str) -> bytes | None:
        asked = "SELECT response FROM answers WHERE owner = ? AND id = ?"
        row = self._open().execute(asked, (owner, name)).fetchone()
        return zlib.decompress(row[0]) if row is not None else None

    def _forget(self, owner: str, name: str) -> bool:
        asked = "DELETE FROM answers WHERE owner = ? AND id = ?"
        return bool(self._open().execute(asked, (owner, name)).rowcount)


def _items(given: Any) -> list[Any]:
    if isinstance(given, list):
        return given
    return [{"role": "user", "content": given}] if isinstance(given, str) else []


def _as_input(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as one of a prompt: without what is empty there."""
    return {name: value for name, value in item.items() if value is not None}
