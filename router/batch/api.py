"""The OpenAI Files and Batch APIs: routes, checked parameters, and objects as JSON."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.batch.asgi import OPENAI_ERRORS
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
from router.batch.routes import ROUTES
from router.batch.store.blobs import Blobs, UploadForm, receive_form
from router.batch.store.records import BatchStatus, FileRecord
from router.batch.store.store import Store
from router.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
    Unavailable,
)

log = logging.getLogger("conserve.router.batch.api")

_MOST_FILES = 10_000
_MOST_BATCHES, _DEFAULT_BATCHES = 100, 20
_PURPOSES = ("batch",)
_MAX_FILENAME = 255
_MAX_BODY_BYTES = 64 << 10
_CANCELLABLE = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


def make_app(
    store: Store,
    blobs: Blobs,
    config: BatchConfig,
    owner_of: Callable[[Request], str],
    changed: Callable[[], None],
    clock: Callable[[], float],
) -> Starlette:
    """Build the application. `owner_of` names the caller; `changed` wakes the dispatcher."""
    api = BatchApi(store, blobs, config, owner_of, changed, clock)
    app = Starlette(routes=api.routes(), exception_handlers={**OPENAI_ERRORS, **_AWAY})
    app.router.redirect_slashes = False  # it would send clients to this process's own address
    return app


class BatchApi:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        config: BatchConfig,
        owner_of: Callable[[Request], str],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._files, self._batches = store.files, store.batches
        self._coming: Counter[str] = Counter()  # bytes of each owner's uploads under way
        self._blobs = blobs
        self._config = config
        self._owner_of = owner_of
        self._changed = changed
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route(path, getattr(self, answering), methods=[method])
            for path, methods in ROUTES.items()
            for method, answering in methods.items()
        ]

    async def upload(self, request: Request) -> Response:
        """Store a file. What other uploads of the owner may still write counts against the quota."""
        owner = self._owner_of(request)
        length = int(request.headers.get("content-length") or self._config.limits.file_bytes)
        others, self._coming[owner] = self._coming[owner], self._coming[owner] + length
        try:
            return await self._upload(request, owner, others)
        finally:
            self._coming[owner] -= length
            if not self._coming[owner]:
                del self._coming[owner]

    async def _upload(self, request: Request, owner: str, others: int) -> Response:
        file_id = f"file-{secrets.token_hex(16)}"
        content_type = request.headers.get("content-type", "")
        most = _most(request, MOST_BYTES)
        free = most - others if most is not None else None
        if await asyncio.to_thread(self._files.full, owner, free, self._clock()):
            raise _too_much()
        writer = await asyncio.to_thread(self._blobs.create, file_id)
        try:
            form = await receive_form(content_type, request.stream(), writer, self._config.limits.file_bytes)
            filename, purpose, keep_s = self._checked(form)
            await asyncio.to_thread(writer.commit)
        except BaseException:  # a client that left too: no name leads to what came of it
            await asyncio.shield(asyncio.to_thread(writer.discard))
            raise
        now = int(self._clock())
        expires_at = now + keep_s if keep_s is not None else None
        file = FileRecord(file_id, owner, filename, purpose, writer.written, now, expires_at)
        if not await asyncio.to_thread(self._files.add, file, most):
            await asyncio.to_thread(self._blobs.delete, file_id)
            raise _too_much()
        return JSONResponse(_file_object(file))

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

    async def list_files(self, request: Request) -> Response:
        owner = self._owner_of(request)
        query = request.query_params
        count = page_limit(query, _MOST_FILES, _MOST_FILES)
        ascending = one_of(query.get("order", "desc"), "order", ("asc", "desc")) == "asc"
        after, purpose = clean_id_text(query.get("after")), clean_id_text(query.get("purpose"))
        found = await asyncio.to_thread(
            self._files.page, owner, self._clock(), after, count + 1, ascending, purpose
        )
        return _page([_file_object(file) for file in found], count)

    async def get_file(self, request: Request) -> Response:
        return JSONResponse(_file_object(await self._file(request)))

    async def delete_file(self, request: Request) -> Response:
        owner = self._owner_of(request)
        file_id = clean_id_text(request.path_params["file_id"]) or ""
        if not await asyncio.to_thread(self._files.delete, owner, file_id, self._clock()):
            raise _no_such_file(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        headers = {
            "content-length": str(file.bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}",
        }
        chunks = self._blobs.chunks(file.id)
        return StreamingResponse(chunks, media_type="application/octet-stream", headers=headers)

    async def _file(self, request: Request) -> Row[Any]:
        owner = self._owner_of(request)
        file_id = clean_id_text(request.path_params["file_id"]) or ""
        file = await asyncio.to_thread(self._files.get, owner, file_id, self._clock())
        if file is None:
            raise _no_such_file(file_id)
        return file

    async def create_batch(self, request: Request) -> Response:
        owner = self._owner_of(request)
        wanted = new_batch(await _json_body(request))
        now = self._clock()
        file_id = clean_id_text(wanted.input_file_id) or ""
        file = await asyncio.to_thread(self._files.get, owner, file_id, now)
        if file is None:
            text = f"No such File object: {wanted.input_file_id[:80]}. Upload the input file first."
            raise invalid("input_file_id", text, "file_not_found")
        if file.purpose != "batch":
            text = f"The file's purpose is '{file.purpose}'; a batch needs one uploaded for 'batch'."
            raise invalid("input_file_id", text, "invalid_file_purpose")
        batch_id = f"batch_{secrets.token_hex(16)}"
        most = _most(request, MOST_BATCHES)
        batch = await asyncio.to_thread(self._batches.create, batch_id, owner, wanted, now, most)
        if batch is None:
            text = f"{most} batches of this key's owner have not ended; wait for one, or cancel it."
            raise TooManyRequests(text, code="too_many_batches", retry_after_s=60.0)
        self._changed()
        return JSONResponse(_batch_object(batch))

    async def list_batches(self, request: Request) -> Response:
        owner = self._owner_of(request)
        count = page_limit(request.query_params, _MOST_BATCHES, _DEFAULT_BATCHES)
        after = clean_id_text(request.query_params.get("after"))
        found = await asyncio.to_thread(self._batches.page, owner, after, count + 1)
        return _page([_batch_object(batch) for batch in found], count)

    async def get_batch(self, request: Request) -> Response:
        owner = self._owner_of(request)
        batch_id = clean_id_text(request.path_params["batch_id"]) or ""
        batch = await asyncio.to_thread(self._batches.get, owner, batch_id)
        return JSONResponse(_batch_object(_found(batch, batch_id)))

    async def cancel_batch(self, request: Request) -> Response:
        owner = self._owner_of(request)
        batch_id = clean_id_text(request.path_params["batch_id"]) or ""
        found = await asyncio.to_thread(self._batches.cancel, owner, batch_id, self._clock())
        batch = _found(found, batch_id)
        if batch.status not in _CANCELLABLE:
            text = f"Cannot cancel a batch with status '{batch.status}'."
            raise Conflict(text, code="batch_not_cancellable")
        self._changed()
        return JSONResponse(_batch_object(batch))


async def _away(request: Request, error: Exception) -> Response:
    """Answer 503 for a full disk or an unreachable database; nothing was changed."""
    log.warning("not served method=%s path=%r reason=%r", request.method, request.url.path, str(error))
    text = "Files and batches cannot be kept or read at this moment; try again."
    answered: Response = await OPENAI_ERRORS[ApiError](request, Unavailable(text, retry_after_s=5.0))
    return answered


_AWAY = {SQLAlchemyError: _away, OSError: _away}


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:80]}", param="id")


def _found(batch: Row[Any] | None, batch_id: str) -> Row[Any]:
    if batch is None:
        raise NotFound(f"No batch found with id '{batch_id[:80]}'.", param="id")
    return batch


async def _json_body(request: Request) -> bytes:
    """Read a JSON body. Other content types are refused, as a web page of another site can send those."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        text = f"The request body must be application/json, not {kind[:100] or 'of no type'}."
        raise BadRequest(text, param="content-type", code="invalid_content_type")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise PayloadTooLarge(f"The request body is larger than {_MAX_BODY_BYTES} bytes.")
    return body


def _most(request: Request, limit: str) -> int | None:
    """Return a limit that the gateway sent in a header, or None."""
    given = request.headers.get(limit)
    return int(given) if given else None


def _too_much() -> Forbidden:
    text = "The files of this key's owner are at their limit; delete some."
    return Forbidden(text, code="stored_bytes_exceeded")


# OpenAI's objects, rendered from records.


def _page(objects: Sequence[dict[str, Any]], count: int) -> Response:
    """Return one page of the objects. One object more than `count` shows that there is another page."""
    shown = objects[:count]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    page = {"object": "list", "data": shown, "first_id": None, "last_id": None, **ends}
    return JSONResponse({**page, "has_more": len(objects) > count})


def _file_object(file: FileRecord | Row[Any]) -> dict[str, Any]:
    names = ("id", "bytes", "created_at", "expires_at", "filename", "purpose")
    shown = {name: getattr(file, name) for name in names}
    return {"object": "file", **shown, "status": "processed", "status_details": None}


_AS_RECORDED = (
    *("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id"),
    *("error_file_id", "created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at", "metadata"),
)


def _batch_object(batch: Row[Any]) -> dict[str, Any]:
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
