"""/v1/files: upload, list, get, content, delete."""

import asyncio
from collections.abc import Callable
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.batch.api import params
from router.batch.api.multipart import Form, receive_form
from router.batch.api.objects import file_object, page
from router.batch.blobs import Blobs
from router.batch.config import BatchConfig
from router.batch.records import FileRecord, new_id
from router.batch.store.store import Store
from router.errors import BadRequest, NotFound

_MOST = 10_000
_PURPOSES = ("batch",)
_MAX_FILENAME = 255


class FilesApi:
    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        config: BatchConfig,
        owner_of: Callable[[Request], str],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._config = config
        self._owner_of = owner_of
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.upload, methods=["POST"]),
            Route("/v1/files", self.list_files, methods=["GET"]),
            Route("/v1/files/{file_id}", self.get, methods=["GET"]),
            Route("/v1/files/{file_id}", self.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
        ]

    async def upload(self, request: Request) -> Response:
        owner = self._owner_of(request)
        file_id = new_id("file-")
        writer = await asyncio.to_thread(self._blobs.create, file_id)
        try:
            form = await receive_form(
                request.headers.get("content-type", ""),
                request.stream(),
                writer,
                self._config.limits.file_bytes,
            )
            filename, purpose, ttl_s = self._checked(form)
            await asyncio.to_thread(writer.commit)
        except BaseException:  # a client that left too: no name leads to what came of it
            await asyncio.shield(asyncio.to_thread(writer.discard))
            raise
        now = int(self._clock())
        expires_at = now + ttl_s if ttl_s is not None else None
        file = FileRecord(file_id, 0, owner, filename, purpose, writer.written, now, expires_at)
        await asyncio.to_thread(self._store.files.add, file)
        return JSONResponse(file_object(file))

    def _checked(self, form: Form) -> tuple[str, str, int | None]:
        if form.filename is None:
            raise BadRequest(
                "Missing required parameter: 'file'.", param="file", code="missing_required_parameter"
            )
        if "purpose" not in form.fields:
            raise BadRequest(
                "Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter"
            )
        purpose = params.one_of(form.fields["purpose"], "purpose", _PURPOSES)
        anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        given = anchor is not None or seconds is not None
        ttl_s = params.ttl_s(anchor, seconds, "expires_after") if given else self._config.file_ttl_s
        return form.filename.replace("\0", "")[:_MAX_FILENAME], purpose, ttl_s

    async def list_files(self, request: Request) -> Response:
        owner = self._owner_of(request)
        query = request.query_params
        count = params.limit(query, _MOST, _MOST)
        order = params.one_of(query.get("order", "desc"), "order", ("asc", "desc"))
        found = await asyncio.to_thread(
            self._store.files.page,
            owner,
            self._clock(),
            params.id_of(query.get("after")),
            count + 1,
            order == "asc",
            params.id_of(query.get("purpose")),
        )
        return JSONResponse(page([file_object(file) for file in found[:count]], len(found) > count))

    async def get(self, request: Request) -> Response:
        return JSONResponse(file_object(await self._file(request)))

    async def delete(self, request: Request) -> Response:
        owner = self._owner_of(request)
        file_id = params.id_of(request.path_params["file_id"]) or ""
        if not await asyncio.to_thread(self._store.files.delete, owner, file_id, self._clock()):
            raise _no_such_file(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        return StreamingResponse(
            self._blobs.chunks(file.id),
            media_type="application/octet-stream",
            headers={
                "content-length": str(file.bytes),
                "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename)}",
            },
        )

    async def _file(self, request: Request) -> FileRecord:
        owner = self._owner_of(request)
        file_id = params.id_of(request.path_params["file_id"]) or ""
        file = await asyncio.to_thread(self._store.files.get, owner, file_id, self._clock())
        if file is None:
            raise _no_such_file(file_id)
        return file


def _no_such_file(file_id: str) -> NotFound:
    return NotFound(f"No such File object: {file_id[:80]}", param="id")
