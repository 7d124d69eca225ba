"""Stored answers of the Responses API, so that the loss of a decoder costs KV and not history.

A request that names an answer or a `conversation` goes to engines with its whole input, like any other turn;
engines store nothing. An answer is stored before its client has the end of it, unless the disk is slow.
"""

import asyncio
import logging
import sqlite3
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    excerpt,
)
from router.gateway.config import AnswersConfig
from router.gateway.responses.answer_observer import MOST_BYTES, AnswerObserver
from router.gateway.responses.answer_store import (
    PIECE_BYTES,
    AnswerStore,
    HistoryMissing,
    Missing,
    StoredAnswer,
)
from router.http import RawHeaders, ServerLimits, StreamObserver
from router.identity.conversation_ids import named_conversation
from router.requests.body_parser import ParsedBody, is_cheap
from router.requests.body_spans import Span, cut_items
from router.requests.fields import with_fields, with_items
from router.requests.parser_pool import ParserPool

log = logging.getLogger("conserve.router.responses")

LONGEST_HISTORY = 1_000  # answers
MOST_WAITING_BYTES = 256 << 20  # of answers that are not written yet
LONGEST_S = 10.0  # for one call of the disk
SHOWN_WITHIN_S = 1.0  # longest time that an answer's end is held back because it is not stored yet
RESPONSE_FIELDS = b"x-response-says"  # header to engines: fields of the response about its history
_DISK_ERRORS = (sqlite3.Error, OSError, GatewayConfigError, zlib.error)  # TimeoutError is an OSError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class History:
    """Items that a request adds to a history, and the answer or conversation that it continues."""

    request_items: tuple[bytes, ...]  # items with commas between them, in pieces
    previous: str | None  # id of the answer that the request continues
    conversation: str | None
    stored: bool  # whether the answer is to be stored
    conversation_end: int = 0  # number of the conversation's last end when the turn began

    @property
    def response_fields(self) -> dict[str, Any]:
        """Return the response's fields that name the answer or conversation before it."""
        if self.conversation is not None:
            return {"previous_response_id": None, "conversation": {"id": self.conversation}}
        return {"previous_response_id": self.previous}

    @property
    def headers(self) -> RawHeaders:
        named = self.previous or self.conversation
        return [(RESPONSE_FIELDS, orjson.dumps(self.response_fields))] if named else []


@dataclass(frozen=True, slots=True)
class AnswerParser:
    """Parser that finds id, items and response object in an engine's answer."""

    space: str  # owner
    response_fields: Mapping[str, Any]

    def parse(self, pieces: Sequence[bytes]) -> tuple[str, bytes, bytes]:
        """Return the answer's id, its items for a later prompt, and its response object as JSON.

        Raises ValueError if `pieces` are not an answer of the Responses API.
        """
        answer = orjson.loads(b"".join(pieces))
        answer = answer.get("response", answer) if isinstance(answer, dict) else {}
        name, output = answer.get("id"), answer.get("output")
        if not isinstance(name, str) or not isinstance(output, list):
            raise ValueError("the engine's answer has no id or no output")
        items = [  # an item of a prompt has no empty fields
            {field: value for field, value in item.items() if value is not None}
            for item in output
            if isinstance(item, dict)
        ]
        response = orjson.dumps({**answer, **self.response_fields, "store": True})
        return name, orjson.dumps(items)[1:-1], response


class Answers:
    """Stores and finds answers. One thread does all disk work, and every wait for it is limited."""

    def __init__(
        self,
        config: AnswersConfig,
        *,
        parser_pool: ParserPool | None = None,
        most_bytes: int = ServerLimits().max_body_bytes,
    ) -> None:
        """Create the store. `most_bytes` limits the size of a history and the request that continues it."""
        self._store = AnswerStore(config)
        self._disk = ThreadPoolExecutor(1, "answers")
        self._longest_s, self._shown_s = LONGEST_S, SHOWN_WITHIN_S
        self._parser_pool, self._most_bytes = parser_pool, most_bytes
        self._storing: set[asyncio.Future[None]] = set()
        self._waiting_bytes = 0  # of answers that are not written yet

    async def start(self) -> None:
        """Open the store; after an error, later calls try again.

        Raises GatewayConfigError if a newer version wrote the file.
        """
        try:
            await self._call(self._store.open)
        except (sqlite3.Error, OSError) as error:
            metrics.ANSWERS.labels("failed").inc()
            log.warning("stored answers cannot be opened yet reason=%r", error)

    async def close(self) -> None:
        """Store the answers that wait, if the disk accepts them in time, and close the store."""
        try:
            async with asyncio.timeout(self._longest_s):
                if self._storing:
                    await asyncio.wait(self._storing)
            await self._call(self._store.close)
        except _DISK_ERRORS as error:
            log.warning("stopped before answers were stored answers=%d reason=%r", len(self._storing), error)
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def with_history(
        self, owner: str, pieces: tuple[bytes, ...], read: ParsedBody
    ) -> tuple[tuple[bytes, ...], History]:
        """Return the body to send to an engine, with the history before its input, and the `History`.

        Raises ApiError if the history is not stored, or is too long to be sent again.
        """
        body = read.fields
        previous, conversation = body.get("previous_response_id") or None, named_conversation(body)
        if previous is not None and not isinstance(previous, str):
            raise BadIdentity("previous_response_id must be a string")
        if previous and conversation:
            text = "previous_response_id and conversation each bring a history: send one of them"
            raise BadRequest(text, param="conversation")
        found, end = read.items, 0
        before: tuple[bytes, ...] = ()
        items = cut_items(pieces, found) if isinstance(found, Span) else (found,) if found else ()
        size = sum(map(len, items))
        if conversation:
            previous, end = await self._ask(self._store.newest, owner, conversation)
        sent = with_fields(pieces, {"store": False})
        if previous:
            try:
                limits = LONGEST_HISTORY, max(0, self._most_bytes - size)
                before = await self._ask(self._store.history, owner, previous, *limits)
            except HistoryMissing as missing:
                raise history_error(missing.reason, conversation, self._most_bytes) from None
            self._disk.submit(self._touch, owner, previous)
            both = (*before, b",", *items) if before and items else (*before, *items)
            sent = with_items(with_fields(sent, {"previous_response_id": None}), "input", both)
        stored = body.get("store") is not False and size <= MOST_BYTES
        return sent, History(items, previous, conversation, stored, end)

    def _touch(self, owner: str, name: str) -> None:
        """Record the use of a history. A failure is only logged, because a full disk can still be read."""
        try:
            self._store.touch(owner, name)
        except _DISK_ERRORS as error:
            log.warning("the use of stored answers was not recorded reason=%r", error)

    def observer(self, owner: str, history: History | None, *arguments: Any) -> StreamObserver:
        """Return an observer for an answer. The observer stores the answer if `history.stored`."""
        if history is None or not history.stored:
            return StreamObserver(*arguments)
        return AnswerObserver(lambda response: self.store(owner, history, response), *arguments)

    def store(self, owner: str, history: History, response: bytes) -> asyncio.Future[None] | None:
        """Store an answer in the background.

        Returns a future that is done when the answer is stored or SHOWN_WITHIN_S has passed; None if the
        answer is not stored, because there is none or too much waits for the disk.
        """
        size = sum(map(len, history.request_items)) + len(response)
        if not response:
            return None
        if self._waiting_bytes + size > MOST_WAITING_BYTES:
            metrics.ANSWERS.labels("failed").inc()
            log.warning("an answer is not stored: the disk is slow waiting_bytes=%d", self._waiting_bytes)
            return None
        self._waiting_bytes += size
        storing = asyncio.ensure_future(self._parse_and_put(owner, history, response))
        self._storing.add(storing)
        storing.add_done_callback(lambda done: self._stored(done, size))
        return asyncio.ensure_future(self._shortly(storing))

    async def _parse_and_put(self, owner: str, history: History, response: bytes) -> None:
        parsing, parsed = AnswerParser(owner, history.response_fields), None
        if self._parser_pool is not None and not is_cheap((response,)):
            cut = (response[at : at + PIECE_BYTES] for at in range(0, len(response), PIECE_BYTES))
            parsed = await self._parser_pool.parse_queued(parsing, tuple(cut))

        def put() -> None:
            name, items, shown = parsed or parsing.parse((response,))
            whole = b"".join(history.request_items)
            whole += b"," + items if whole and items else items
            answer = StoredAnswer(
                name, history.previous, whole, shown, history.conversation, history.conversation_end
            )
            self._store.put(owner, answer)
            try:
                metrics.ANSWERS.labels("pruned").inc(self._store.prune())
            except _DISK_ERRORS as error:
                log.warning("stored answers were not pruned reason=%r", error)

        await asyncio.get_running_loop().run_in_executor(self._disk, put)

    async def _shortly(self, storing: asyncio.Future[None]) -> None:
        done, _ = await asyncio.wait((storing,), timeout=self._shown_s)
        if not done:
            metrics.ANSWERS.labels("late").inc()
            log.warning("an answer goes out before it is stored waited_s=%.1f", self._shown_s)

    def _stored(self, done: asyncio.Future[None], size: int) -> None:
        self._storing.discard(done)
        self._waiting_bytes -= size
        if done.cancelled():
            return
        error = done.exception()
        metrics.ANSWERS.labels("kept" if error is None else "failed").inc()
        if error is not None:
            log.warning("an answer could not be stored reason=%r", error)

    async def response(self, owner: str, name: str) -> bytes | None:
        """Return a stored response object; None if there is none."""
        return await self._ask(self._store.response, owner, name)

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a stored answer, and return whether there was one."""
        return await self._ask(self._store.delete, owner, name)

    async def end_conversation(self, owner: str, conversation: str, live: bool) -> bool:
        """End a conversation, and return whether it had a history. See `AnswerStore.end_conversation`."""
        return await self._ask(self._store.end_conversation, owner, conversation, live)

    async def _ask(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return await self._call(function, *arguments)
        except _DISK_ERRORS as error:
            log.warning("stored answers cannot be reached reason=%r", error)
            metrics.ANSWERS.labels("failed").inc()
            text = "stored answers cannot be reached now; try again"
            raise Unavailable(text, retry_after_s=1.0) from error

    async def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        async with asyncio.timeout(self._longest_s):
            return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)


def history_error(reason: Missing, conversation: str | None, most_bytes: int) -> ApiError:
    """Return the error that a client gets for a history that cannot be continued."""
    param = "conversation" if conversation else "previous_response_id"
    advice = "send the messages that matter as input"
    if conversation:
        advice += f", or DELETE /v1/conversations/{excerpt(conversation)} to begin it anew"
    if reason is Missing.TOO_MANY:
        text = f"the history has more than {LONGEST_HISTORY} answers, which is more than can be sent again"
        return BadRequest(f"{text}: {advice}", param=param, code="history_too_long")
    if reason is Missing.TOO_LARGE:
        text = f"the history and this request have more than {most_bytes} bytes together: {advice}"
        return PayloadTooLarge(text, param=param, code="history_too_large")
    text = "no such response is stored: it expired long ago, or never existed"
    if reason is Missing.DELETED:
        text = "an answer of that history was deleted, and nothing continues from it"
    elif reason is Missing.EXPIRED:
        text = "an answer of that history is not stored any more"
    return NotFound(f"{text}; {advice}", param=param, code="previous_response_not_found")
