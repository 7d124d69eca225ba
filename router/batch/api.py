"""Answers requests of OpenAI's Files and Batch APIs."""

import asyncio
import logging
import secrets
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qsl, quote

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from router.batch.config import BatchConfig
from router.batch.forwarding import MOST_BATCHES, MOST_BYTES
from router.batch.parameters import (
    clean_id_text,
    invalid,
    missing,
    new_batch,
    one_of,
    page_limit,
    time_to_live_s,
)
from router.batch.routes import find_route
from router.batch.store.blobs import Blobs, UploadForm, receive_form
from router.batch.store.database import disk_problem, reason_of
from router.batch.store.records import BatchStatus, FileRecord
from router.batch.store.store import Store
from router.errors import (
    BadRequest,
    ClientLeft,
    Conflict,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    TooManyRequests,
    Unavailable,
    excerpt,
)
from router.http import Headers, Request, Responder

log = logging.getLogger("conserve.router.batch.api")

_MOST_FILES = 10_000
_MOST_BATCHES, _DEFAULT_BATCHES = 100, 20
_PURPOSES = ("batch",)
_MAX_FILENAME = 255
_MAX_BODY_BYTES = 64 << 10
_CANCELLABLE = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)

Shown = dict[str, Any]  # one of OpenAI's objects


@dataclass(frozen=True, slots=True)
class BatchCall:
    """Request of the Files and Batch APIs, with its owner and the id in its path."""

    request: Request
    owner: str
    id: str = ""

    @property
    def query(self) -> Mapping[str, str]:
        return dict(parse_qsl(self.request.query.decode("latin-1"), keep_blank_values=True))

    def id_in_query(self, name: str) -> str | None:
        given = self.query.get(name)
        return None if given is None else clean_id_text(given)

    @property
    def content_type(self) -> str:
        return self.request.headers.text(b"content-type") or ""

    def most(self, limit: bytes) -> int | None:
        """Return the owner's limit, which the gateway sent in the header `limit`; None without the header."""
        given = self.request.headers.get(limit)
        return int(given) if given else None

    def pieces(self) -> AsyncIterator[bytes]:
        """Iterate over the pieces of the request's body, whose size `receive_form` limits."""
        return self.request.body.pieces(sys.maxsize)

    async def json_body(self) -> bytes:
        """Read a JSON body. Other content types are refused, because pages of other sites can send them."""
        kind = self.content_type.partition(";")[0].strip().lower()
        if kind != "application/json":
            text = f"The request body must be application/json, not {excerpt(kind) or 'of no type'}."
            raise BadRequest(text, param="content-type", code="invalid_content_type")
        return await self.request.body.read(_MAX_BODY_BYTES)


class BatchApi:
    """Answers requests of the Files and Batch APIs, by the methods that `ROUTES` names."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        config: BatchConfig,
        owner_of: Callable[[Headers], str],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Set up the APIs. `owner_of` returns a request's owner; `changed` wakes the dispatcher."""
        self._files, self._batches = store.files, store.batches
        self._coming: Counter[str] = Counter()  # bytes that each owner's uploads under way may write
        self._blobs = blobs
        self._config = config
        self._owner_of = owner_of
        self._changed = changed
        self._clock = clock

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer a request. A full disk or an unreachable database gives a 503, and nothing has changed."""
        methods, ids = find_route(request.path)
        name = methods.get("GET" if request.method == "HEAD" else request.method)
        if name is None:
            allow = ", ".join(methods)
            text = f"{excerpt(request.path)} does not take {request.method}; it takes {allow}."
            raise MethodNotAllowed(text, allow=allow)
        call = BatchCall(request, self._owner_of(request.headers), *(clean_id_text(one) for one in ids))
        try:
            if name == "content":
                await self._send_content(call, responder)
            else:
                responder.respond_json(await getattr(self, name)(call))
        except ClientLeft:
            log.info("client left method=%s path=%r", request.method, request.path)
        except (SQLAlchemyError, OSError) as error:
            if responder.started:
                raise
            log.warning(
                "not served method=%s path=%r reason=%r", request.method, request.path, reason_of(error)
            )
            problem = disk_problem(error)
            why = f": {problem}; free space or fix the disk, then" if problem else " at this moment;"
            text = f"Files and batches cannot be stored or read{why} try again."
            raise Unavailable(text, retry_after_s=5.0) from error

    async def upload(self, call: BatchCall) -> Shown:
        """Store a file. The bytes that other uploads of the owner may still write count as used."""
        owner, announced = call.owner, call.request.body.length
        length = announced if announced is not None else self._config.limits.file_bytes
        others, self._coming[owner] = self._coming[owner], self._coming[owner] + length
        try:
            return await self._upload(call, others)
        finally:
            self._coming[owner] -= length
            if not self._coming[owner]:
                del self._coming[owner]

    async def _upload(self, call: BatchCall, others: int) -> Shown:
        owner, file_id = call.owner, f"file-{secrets.token_hex(16)}"
        most, limit = call.most(MOST_BYTES), self._config.limits.file_bytes
        free = most - others if most is not None else None
        if await asyncio.to_thread(self._files.full, owner, free, self._clock()):
            raise _too_much()
        writer = await asyncio.to_thread(self._blobs.create, file_id)
        try:
            form = await receive_form(call.content_type, call.pieces(), writer, limit)
            filename, purpose, keep_s = self._checked(form)
            await asyncio.to_thread(writer.commit)
        except BaseException:  # also if the client has left: nobody knows the file's id
            await asyncio.shield(asyncio.to_thread(writer.discard))
            raise
        now = int(self._clock())
        expires_at = now + keep_s if keep_s is not None else None
        file = FileRecord(file_id, owner, filename, purpose, writer.written, now, expires_at)
        if not await asyncio.to_thread(self._files.add, file, most):
            await asyncio.to_thread(self._blobs.delete, file_id)
            raise _too_much()
        return _file_object(file)

    def _checked(self, form: UploadForm) -> tuple[str, str, int | None]:
        if form.filename is None:
            raise missing("file")
        if "purpose" not in form.fields:
            raise missing("purpose")
        purpose = one_of(form.fields["purpose"], "purpose", _PURPOSES)
        anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        given = anchor is not None or seconds is not None
        keep_s = time_to_live_s(anchor, seconds, "expires_after") if given else self._config.file_ttl_s
        return form.filename.replace("\0", "")[:_MAX_FILENAME], purpose, keep_s

    async def list_files(self, call: BatchCall) -> Shown:
        query = call.query
        count = page_limit(query, _MOST_FILES, _MOST_FILES)
        ascending = one_of(query.get("order", "desc"), "order", ("asc", "desc")) == "asc"
        after, purpose = call.id_in_query("after"), call.id_in_query("purpose")
        found = await asyncio.to_thread(
            self._files.page, call.owner, self._clock(), after, count + 1, ascending, purpose
        )
        return _page([_file_object(file) for file in found], count)

    async def get_file(self, call: BatchCall) -> Shown:
        return _file_object(await self._file(call))

    async def delete_file(self, call: BatchCall) -> Shown:
        if not await asyncio.to_thread(self._files.delete, call.owner, call.id, self._clock()):
            raise _no_such_file(call.id)
        return {"id": call.id, "object": "file", "deleted": True}

    async def _send_content(self, call: BatchCall, responder: Responder) -> None:
        file = await self._file(call)
        name = quote(file.filename, safe="").encode()
        chunks = self._blobs.chunks(file.id)
        chunk = await asyncio.to_thread(next, chunks, b"")
        responder.start(
            200,
            [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", b"%d" % file.bytes),
                (b"content-disposition", b"attachment; filename*=UTF-8''" + name),
                (b"date", formatdate(usegmt=True).encode()),
            ],
        )
        while chunk:
            responder.write(chunk)
            await responder.drain()
            if responder.disconnected:
                raise ClientLeft
            chunk = await asyncio.to_thread(next, chunks, b"")
        responder.finish()

    async def _file(self, call: BatchCall) -> Row[Any]:
        file = await asyncio.to_thread(self._files.get, call.owner, call.id, self._clock())
        if file is None:
            raise _no_such_file(call.id)
        return file

    async def create_batch(self, call: BatchCall) -> Shown:
        owner, wanted, now = call.owner, new_batch(await call.json_body()), self._clock()
        file_id = clean_id_text(wanted.input_file_id)
        file = await asyncio.to_thread(self._files.get, owner, file_id, now)
        if file is None:
            text = f"No such File object: {excerpt(wanted.input_file_id)}. Upload the input file first."
            raise invalid("input_file_id", text, "file_not_found")
        if file.purpose != "batch":
            text = f"The file's purpose is '{file.purpose}'; a batch needs one uploaded for 'batch'."
            raise invalid("input_file_id", text, "invalid_file_purpose")
        batch_id = f"batch_{secrets.token_hex(16)}"
        most = call.most(MOST_BATCHES)
        batch = await asyncio.to_thread(self._batches.create, batch_id, owner, wanted, now, most)
        if batch is None:
            text = f"{most} batches of this key's owner have not ended; wait for one, or cancel it."
            raise TooManyRequests(text, code="too_many_batches", retry_after_s=60.0)
        self._changed()
        return _batch_object(batch)

    async def list_batches(self, call: BatchCall) -> Shown:
        count = page_limit(call.query, _MOST_BATCHES, _DEFAULT_BATCHES)
        found = await asyncio.to_thread(self._batches.page, call.owner, call.id_in_query("after"), count + 1)
        return _page([_batch_object(batch) for batch in found], count)

    async def get_batch(self, call: BatchCall) -> Shown:
        batch = await asyncio.to_thread(self._batches.get, call.owner, call.id)
        return _batch_object(_found(batch, call.id))

    async def cancel_batch(self, call: BatchCall) -> Shown:
        found = await asyncio.to_thread(self._batches.cancel, call.owner, call.id, self._clock())
        batch = _found(found, call.id)
        if batch.status not in _CANCELLABLE:
            text = f"Cannot cancel a batch with status '{batch.status}'."
            raise Conflict(text, code="batch_not_cancellable")
        self._changed()
        return _batch_object(batch)


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {excerpt(file_id)}", param="id")


def _found(batch: Row[Any] | None, batch_id: str) -> Row[Any]:
    if batch is None:
        raise NotFound(f"No batch found with id '{excerpt(batch_id)}'.", param="id")
    return batch


def _too_much() -> Forbidden:
    text = "The files of this key's owner are at their limit; delete some."
    return Forbidden(text, code="stored_bytes_exceeded")


# OpenAI's objects, made from rows.


def _page(objects: Sequence[Shown], count: int) -> Shown:
    """Return the first `count` objects as a page. An object beyond them shows that another page follows."""
    shown = objects[:count]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    page = {"object": "list", "data": shown, "first_id": None, "last_id": None, **ends}
    return {**page, "has_more": len(objects) > count}


def _file_object(file: FileRecord | Row[Any]) -> Shown:
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    shown = {name: getattr(file, name) for name in names}
    return {"object": "file", **shown, "status": "processed", "status_details": None}


_AS_RECORDED = (
    *("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id"),
    *("error_file_id", "created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at", "metadata"),
)


def _batch_object(batch: Row[Any]) -> Shown:
    errors = batch.errors
    return {
        "object": "batch",
        **{name: getattr(batch, name) for name in _AS_RECORDED},
        "errors": {"object": "list", "data": errors} if errors else None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
    }
