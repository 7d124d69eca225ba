"""/v1/batches: create, get, list, cancel."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.batch.api import params
from router.batch.api.objects import batch_object, page
from router.batch.records import BatchRecord, BatchStatus, new_id
from router.batch.store.store import Store
from router.errors import BadRequest, Conflict, NotFound, PayloadTooLarge

_MOST, _DEFAULT = 100, 20
_MAX_BODY_BYTES = 64 << 10
_CANCELLABLE = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


class BatchesApi:
    def __init__(
        self,
        store: Store,
        owner_of: Callable[[Request], str],
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`changed` tells the dispatcher of this gateway that there is something to do."""
        self._store = store
        self._owner_of = owner_of
        self._changed = changed
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/v1/batches", self.create, methods=["POST"]),
            Route("/v1/batches", self.list_batches, methods=["GET"]),
            Route("/v1/batches/{batch_id}", self.get, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        owner = self._owner_of(request)
        wanted = params.new_batch(await _body(request))
        now = self._clock()
        file = await asyncio.to_thread(
            self._store.files.get, owner, params.id_of(wanted.input_file_id) or "", now
        )
        if file is None:
            raise BadRequest(
                f"No such File object: {wanted.input_file_id[:80]}. Upload the input file first.",
                param="input_file_id",
                code="file_not_found",
            )
        if file.purpose != "batch":
            raise BadRequest(
                f"The file's purpose is '{file.purpose}'; a batch needs one uploaded for 'batch'.",
                param="input_file_id",
                code="invalid_file_purpose",
            )
        batch = await asyncio.to_thread(
            self._store.batches.create,
            new_id("batch_"),
            owner,
            wanted.endpoint,
            wanted.input_file_id,
            wanted.completion_window,
            wanted.window_s,
            wanted.output_ttl_s,
            wanted.metadata,
            now,
        )
        self._changed()
        return JSONResponse(batch_object(batch))

    async def list_batches(self, request: Request) -> Response:
        owner = self._owner_of(request)
        count = params.limit(request.query_params, _MOST, _DEFAULT)
        found = await asyncio.to_thread(
            self._store.batches.page, owner, params.id_of(request.query_params.get("after")), count + 1
        )
        return JSONResponse(page([batch_object(batch) for batch in found[:count]], len(found) > count))

    async def get(self, request: Request) -> Response:
        owner = self._owner_of(request)
        batch_id = params.id_of(request.path_params["batch_id"]) or ""
        return JSONResponse(
            batch_object(_found(await asyncio.to_thread(self._store.batches.get, owner, batch_id), batch_id))
        )

    async def cancel(self, request: Request) -> Response:
        owner = self._owner_of(request)
        batch_id = params.id_of(request.path_params["batch_id"]) or ""
        batch = await asyncio.to_thread(self._store.batches.cancel, owner, batch_id, self._clock())
        batch = _found(batch, batch_id)
        if batch.status not in _CANCELLABLE:
            raise Conflict(
                f"Cannot cancel a batch with status '{batch.status}'.", code="batch_not_cancellable"
            )
        self._changed()
        return JSONResponse(batch_object(batch))


def _found(batch: BatchRecord | None, batch_id: str) -> BatchRecord:
    if batch is None:
        raise NotFound(f"No batch found with id '{batch_id[:80]}'.", param="id")
    return batch


async def _body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise PayloadTooLarge(f"The request body is larger than {_MAX_BODY_BYTES} bytes.")
    return body
