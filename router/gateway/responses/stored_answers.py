"""Stored answers of the Responses API, so that a decoder's end costs KV and not history.

A request that names one of them, or a `conversation`, which its newest answer is, goes to engines with its
whole input, like any other; engines store nothing. What nobody named for `keep_s` goes, and the oldest beyond
`max_bytes`. How large a history is, is known before any of it is read, and no wait for the disk is without a
limit (`answer_store.py`).
"""

import asyncio
import logging
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from router import metrics
from router.errors import (
    ApiError,
    BadIdentity,
    BadRequest,
    GatewayConfigError,
    NotFound,
    PayloadTooLarge,
    Unavailable,
)
from router.gateway.config import AnswersConfig
from router.gateway.responses.answer_store import AnswerStore, ChainEnd, DiskThread, StoredChain
from router.gateway.responses.items import PIECE_BYTES, AnswerParser, ReadAnswer, Span, cut_items
from router.http import RawHeaders, ServerLimits, StreamObserver
from router.identity.conversation_ids import named_conversation
from router.process import SteadyClock
from router.requests.body_parser import ParsedBody, is_cheap
from router.requests.fields import with_fields, with_items
from router.requests.parser_pool import ParserPool

log = logging.getLogger("conserve.router.answers")

MOST_BYTES = 16 << 20  # of one answer, or of a request that is kept with it
LONGEST_HISTORY = 1_000  # answers
MOST_WAITING_BYTES = 256 << 20  # of answers that are not written yet
LONGEST_S = 10.0  # for one call of the disk, and for a history
SHOWN_WITHIN_S = 1.0  # a client has the end of an answer that is not stored by then
_MOST_AT_ONCE = 100  # answers that one call reads, or PIECE_BYTES of them: other owners' come between
_LATE_S, _TRIES = 0.05, 10  # an answer that another process is about to write
_END = re.compile(rb"(?:\A|[\r\n])event: response\.(?:completed|incomplete)\r?\ndata:")
_ENDS = (b"response.completed", b"response.incomplete")
_DISK = (sqlite3.Error, OSError, GatewayConfigError, zlib.error)  # what a file of answers may raise

Result = TypeVar("Result")


SAYS = b"x-response-says"  # to engines: fields of the answer, where its history is not theirs


@dataclass(frozen=True, slots=True)
class History:
    """Where a request's answer stands."""

    asked: tuple[bytes, ...]  # the request's own items, with commas between them, in pieces
    previous: str | None  # the answer before it
    conversation: str | None
    kept: bool  # with its answer, once that is there
    deleted_at: float = 0.0  # the conversation, before this turn

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
    """Also keeps the response object that an answer is, or ends with, before its client has the end."""

    __slots__ = ("_ends", "_keep", "_kept", "_kept_bytes")

    def __init__(self, keep: Callable[[bytes], asyncio.Future[None] | None], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keep = keep
        self._ends = False  # the event that has it has begun
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def feed(self, data: bytes) -> None:
        super().feed(data)
        if self.streamed and any(end in data for end in _ENDS):
            found = [*_END.finditer(data)]  # JSON has no line in it: no text is mistaken for an event
            if found:
                data, self._ends, self._kept, self._kept_bytes = data[found[-1].end() :], True, [], 0
        if self._ends or not self.streamed:
            self._kept_bytes += len(data)
            self._kept.append(data if self._kept_bytes <= MOST_BYTES else b"")

    @property
    def holds_end(self) -> bool:
        return self._ends and self._kept_bytes <= MOST_BYTES

    def at_end(self) -> asyncio.Future[None] | None:
        return self._keep(self.response) if self._status == 200 else None

    @property
    def response(self) -> bytes:
        """JSON of it, or of the event that has it; empty when there is none, or too much of it."""
        kept = b"".join(self._kept) if self._kept_bytes <= MOST_BYTES else b""
        return kept[: kept.find(b"\n")] if self.streamed else kept


class Answers:
    def __init__(
        self,
        config: AnswersConfig,
        clock: SteadyClock | None = None,
        *,
        parser_pool: ParserPool | None = None,
        most_bytes: int = ServerLimits().max_body_bytes,
    ) -> None:
        """`parser_pool`: of answers that are costly to read; `most_bytes`: of a history with a request."""
        self._store = AnswerStore(config, clock or SteadyClock())
        self._thread, self._longest_s = DiskThread("answers", LONGEST_S), LONGEST_S
        self._shown_s = SHOWN_WITHIN_S
        self._parser_pool, self._most_bytes = parser_pool, most_bytes
        self._keeping: set[asyncio.Future[None]] = set()
        self._waiting_bytes = 0  # of answers that are not written yet

    async def start(self) -> None:
        """Refuses a file of a newer version. One that cannot be opened is tried again when it is needed."""
        try:
            await self._thread.run(self._store.open)
        except (sqlite3.Error, OSError) as wrong:  # TimeoutError among them
            metrics.ANSWERS.labels("failed").inc()
            log.warning("stored answers cannot be opened yet reason=%r", wrong)

    async def close(self) -> None:
        """What waits is written first, if the disk takes it."""
        try:
            async with asyncio.timeout(self._longest_s):
                if self._keeping:
                    await asyncio.wait(self._keeping)
            await self._thread.close(self._store.close)
        except _DISK as wrong:
            log.warning("stored answers do not end answers_lost=%d reason=%r", len(self._keeping), wrong)

    async def with_history(
        self, owner: str, pieces: tuple[bytes, ...], read: ParsedBody
    ) -> tuple[tuple[bytes, ...], History]:
        """The body for the engine, in pieces, and what to keep. Refuses what does not go on from anything."""
        body = read.fields
        previous, conversation = body.get("previous_response_id") or None, named_conversation(body)
        if previous is not None and not isinstance(previous, str):
            raise BadIdentity("previous_response_id must be a string")
        if previous and conversation:
            text = "previous_response_id and conversation each bring a history: send one of them"
            raise BadRequest(text, param="conversation")
        found, before = read.items, list[bytes]()
        asked = cut_items(pieces, found) if isinstance(found, Span) else (found,) if found else ()
        size, deleted_at = sum(map(len, asked)), 0.0
        try:
            async with asyncio.timeout(self._longest_s):
                if conversation:
                    known = await self._run(self._store.conversation, owner, conversation)
                    previous, deleted_at = known.newest, known.deleted_at
                if previous:
                    before = await self._history(owner, previous, conversation, size)
        except TimeoutError as wrong:
            raise _unavailable(wrong) from None
        sent = with_fields(pieces, {"store": False})
        if previous:
            both = (*before, b",", *asked) if before and asked else (*before, *asked)
            sent = with_items(with_fields(sent, {"previous_response_id": None}), "input", both)
        kept = body.get("store") is not False and size <= MOST_BYTES
        return sent, History(asked, previous, conversation, kept, deleted_at)

    async def _history(self, owner: str, previous: str, conversation: str | None, size: int) -> list[bytes]:
        """The items up to the answer before, in pieces. `size`: of those that come behind them."""
        chain = await self._chain(owner, previous, size)
        for _ in range(_TRIES if chain.end is ChainEnd.UNKNOWN and not conversation else 0):
            await asyncio.sleep(_LATE_S)
            chain = await self._chain(owner, previous, size)
            if chain.end is not ChainEnd.UNKNOWN:
                break
        limits = LONGEST_HISTORY, self._most_bytes
        if chain.end is not ChainEnd.BEGINNING:
            raise no_such_history(chain.end, conversation, *limits)
        named = [name for name, _ in chain.answers]
        self._thread.submit(self._store.used, owner, conversation, named).add_done_callback(_used)
        before: list[bytes] = []
        for names in _at_once(chain.answers):
            items = await self._run(self._store.items, owner, names)
            if items is None:  # deleted meanwhile
                raise no_such_history(ChainEnd.DELETED, conversation, *limits)
            before += (b",", *items) if before and items else items
        return before

    async def _chain(self, owner: str, name: str, size: int) -> StoredChain:
        most_bytes = max(0, self._most_bytes - size)
        return await self._run(self._store.chain, owner, name, LONGEST_HISTORY, most_bytes)

    def observer(self, owner: str, history: History | None, *arguments: Any) -> StreamObserver:
        """Of an answer that is kept, or of one that is not."""
        if history is None or not history.kept:
            return StreamObserver(*arguments)
        return AnswerObserver(lambda response: self.keep(owner, history, response), *arguments)

    def keep(self, owner: str, kept: History, response: bytes) -> asyncio.Future[None] | None:
        """In the thread; what comes back is done once it is there, or takes too long. Not where too much
        waits for it."""
        size = sum(map(len, kept.asked)) + len(response)
        if not response:
            return None
        if self._waiting_bytes + size > MOST_WAITING_BYTES:
            metrics.ANSWERS.labels("failed").inc()
            log.warning("an answer is not stored: the disk is slow waiting_bytes=%d", self._waiting_bytes)
            return None
        self._waiting_bytes += size
        keeping: asyncio.Future[None]
        reading = AnswerParser(owner, kept.said)
        if self._parser_pool is None or is_cheap((response,)):
            keeping = self._thread.submit(self._write, kept, reading, response)
        else:
            keeping = asyncio.ensure_future(self._keep_costly(self._parser_pool, kept, reading, response))
        self._keeping.add(keeping)
        keeping.add_done_callback(lambda done: self._kept(done, size))
        return asyncio.ensure_future(self._shortly(keeping))

    async def _shortly(self, keeping: asyncio.Future[None]) -> None:
        done, _ = await asyncio.wait((keeping,), timeout=self._shown_s)
        if not done:
            metrics.ANSWERS.labels("late").inc()
            log.warning("an answer goes out before it is stored waited_s=%.1f", self._shown_s)

    async def _keep_costly(
        self, parser_pool: ParserPool, kept: History, reading: AnswerParser, response: bytes
    ) -> None:
        cut = (response[at : at + PIECE_BYTES] for at in range(0, len(response), PIECE_BYTES))
        answer = await parser_pool.parse_queued(reading, tuple(cut))
        await self._thread.submit(self._write, kept, reading, answer)

    def _kept(self, done: asyncio.Future[None], size: int) -> None:
        self._keeping.discard(done)
        self._waiting_bytes -= size
        if done.cancelled():
            return
        wrong = done.exception()
        metrics.ANSWERS.labels("kept" if wrong is None else "failed").inc()
        if wrong is not None:
            log.warning("an answer could not be stored reason=%r", wrong)

    def _write(self, kept: History, reading: AnswerParser, answer: bytes | ReadAnswer) -> None:
        """In the thread."""
        if isinstance(answer, bytes):
            answer = reading.parse((answer,))
        where = kept.previous, kept.conversation
        self._store.keep(reading.space, *where, kept.asked, answer, kept.deleted_at)
        try:
            metrics.ANSWERS.labels("pruned").inc(self._store.prune())
        except _DISK as wrong:
            log.warning("stored answers that are too old, or too many, stay reason=%r", wrong)

    async def find(self, owner: str, name: str) -> bytes | None:
        return await self._run(self._store.find, owner, name)

    async def forget(self, owner: str, name: str) -> bool:
        return await self._run(self._store.forget, owner, name)

    async def leave(self, owner: str, conversation: str, live: bool) -> bool:
        """What is called so next has no history, not even what its turns under way come to."""
        return await self._run(self._store.leave, owner, conversation, live)

    async def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return await self._thread.run(function, *arguments)
        except _DISK as wrong:  # TimeoutError among them
            raise _unavailable(wrong) from wrong


def _unavailable(wrong: Exception) -> Unavailable:
    log.warning("stored answers cannot be reached reason=%r", wrong)
    metrics.ANSWERS.labels("failed").inc()
    return Unavailable("stored answers cannot be reached now; try again", retry_after_s=1.0)


def _used(done: asyncio.Future[None]) -> None:
    """A disk that takes nothing still reads: they count as named before."""
    if not done.cancelled() and (wrong := done.exception()) is not None:
        log.warning("stored answers were named, which could not be written reason=%r", wrong)


def _at_once(answers: Iterable[tuple[str, int]]) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in answers:
        if names and (total + size > PIECE_BYTES or len(names) >= _MOST_AT_ONCE):
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def no_such_history(end: ChainEnd, conversation: str | None, most_answers: int, most_bytes: int) -> ApiError:
    """Of what a request goes on from: an answer, or the newest one of a `conversation`."""
    param = "conversation" if conversation else "previous_response_id"
    do = "send the messages that matter as input"
    if conversation:
        do += f", or DELETE /v1/conversations/{conversation[:100]} to begin it anew"
    if end is ChainEnd.TOO_MANY:
        said = f"the history has more than {most_answers} answers, which is more than can be sent again: {do}"
        return BadRequest(said, param=param, code="history_too_long")
    if end is ChainEnd.TOO_LARGE:
        said = f"the history and this request have more than {most_bytes} bytes together: {do}"
        return PayloadTooLarge(said, param=param, code="history_too_large")
    whys = {
        ChainEnd.DELETED: "an answer of that history was deleted, and nothing goes on from it",
        ChainEnd.GONE: "the beginning of that history is not stored any more",
    }
    unknown = "no such response is stored: it was long ago, or never"
    if conversation:
        unknown = "the newest answer of that conversation is not stored any more"
    why = whys.get(end, unknown)
    return NotFound(f"{why}; {do}", param=param, code="previous_response_not_found")
