"""Routes about the gateway itself: health, readiness, metrics, the API's description, and models."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from placement.engines import Role
from router.auth.keys import Key
from router.directory.api.client import DirectoryClient
from router.errors import JSON_TYPE, ModelNotFound, excerpt
from router.gateway.turn.turn import Models
from router.http import Request, Responder
from router.metrics import HttpCounts

MODELS = "/v1/models"


class StatusRoutes:
    """Answers requests about this gateway process."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory
        self.description = b""  # OpenAPI document
        self.http_counts: HttpCounts | None = None  # of the server that uses these routes

    async def health(self, request: Request, responder: Responder) -> None:
        responder.respond_json({"status": "ok"})

    async def ready(self, request: Request, responder: Responder) -> None:
        """Answer 200 if new conversations can be placed: the directory is connected and a decoder is up."""
        holding = [info for info in self._directory.engines.usable() if info.role is not Role.PREFILL]
        state = {"directory": self._directory.connected, "engines": len(holding)}
        ready = self._directory.connected and bool(holding)
        responder.respond_json({"ready": ready, **state}, 200 if ready else 503)

    async def openapi(self, request: Request, responder: Responder) -> None:
        responder.respond(200, self.description, [JSON_TYPE])

    async def metrics(self, request: Request, responder: Responder) -> None:
        if self.http_counts is not None:
            self.http_counts.bring()
        responder.respond(200, generate_latest(), [(b"content-type", CONTENT_TYPE_LATEST.encode())])


class ModelRoutes:
    """Lists the models that a key may use, with OpenAI's and Anthropic's fields in one answer."""

    def __init__(
        self, models_of: Callable[[tuple[str, ...]], Models], max_context: Callable[[], int]
    ) -> None:
        self._models_of, self._max_context = models_of, max_context
        self._since = int(time.time())

    async def list(self, key: Key, request: Request, responder: Responder) -> None:
        names = list(self._models_of(key.models))
        first, last = (names[0], names[-1]) if names else (None, None)
        page: dict[str, object] = {"object": "list", "data": [self._model(name) for name in names]}
        page |= {"has_more": False, "first_id": first, "last_id": last}
        if b"client_version=" in request.query:
            page["models"] = []  # Codex adds them, with its vendor's metadata, to those that it knows
        responder.respond_json(page)

    async def get(self, key: Key, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(f"{MODELS}/")
        if name not in self._models_of(key.models):
            raise ModelNotFound(f"the model {excerpt(name)!r} does not exist", param="model")
        responder.respond_json(self._model(name))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self._since,
            "created_at": datetime.fromtimestamp(self._since, UTC).isoformat(),
            "owned_by": "conserve",
            "max_model_len": self._max_context() or None,
        }
