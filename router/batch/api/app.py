"""The application: routes, and errors in the OpenAI shape."""

import hashlib
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from router.batch.api.batches import BatchesApi
from router.batch.api.files import FilesApi
from router.batch.blobs import Blobs
from router.batch.config import BatchConfig
from router.batch.store.store import Store
from router.errors import ApiError, MethodNotAllowed, NotFound


def make_app(
    store: Store,
    blobs: Blobs,
    config: BatchConfig,
    owner_of: Callable[[Request], str],
    changed: Callable[[], None],
    clock: Callable[[], float],
) -> Starlette:
    files = FilesApi(store, blobs, config, owner_of, clock)
    batches = BatchesApi(store, owner_of, changed, clock)
    return Starlette(
        routes=[*files.routes(), *batches.routes()],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},
    )


def owner_by_bearer(request: Request) -> str:
    """The caller's name space, from its API key. Without one all callers share a name space."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (
        hashlib.sha256(key.encode()).hexdigest()[:32] if scheme.lower() == "bearer" and key else "anonymous"
    )


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == MethodNotAllowed.status:
        allow = (error.headers or {}).get("Allow")
        refusal: ApiError = MethodNotAllowed(f"{request.method} is not possible here.", allow=allow)
    else:
        refusal = NotFound(f"There is nothing at {request.url.path[:120]}.")
    return await _api_error(request, refusal)
