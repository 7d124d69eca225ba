"""The application: routes, and errors in the OpenAI shape."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request

from router.batch.api.batches import BatchesApi
from router.batch.api.files import FilesApi
from router.batch.blobs import Blobs
from router.batch.config import BatchConfig
from router.batch.store.store import Store
from router.http.asgi import OPENAI_ERRORS


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
        exception_handlers=OPENAI_ERRORS,
    )
