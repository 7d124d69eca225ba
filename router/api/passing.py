"""Requests that belong to no conversation, answered by whichever engine is least busy."""

from router.config import GatewayConfig
from router.directory.client import DirectoryClient
from router.errors import EngineUnreachable, Unavailable, Unsupported
from router.http import Endpoint, RelayEnd, Request, Responder, UpstreamPool, UpstreamRequest, relay
from router.turn import check_model, read_object

_ATTEMPTS = 2


class PassingRoutes:
    def __init__(self, config: GatewayConfig, directory: DirectoryClient, pool: UpstreamPool) -> None:
        self._config = config
        self._directory = directory
        self._pool = pool

    async def embeddings(self, request: Request, responder: Responder) -> None:
        raw = await request.body.read()
        body = read_object(request.headers, raw)
        check_model(body, self._config)
        model = self._config.model(body["model"])
        if model is None or not model.embeddings:
            raise Unsupported(
                f"the model {body['model']!r} generates text and has no embeddings; ask a model that has",
                param="model",
            )
        await self._pass(request, responder, raw)

    async def tokens(self, request: Request, responder: Responder) -> None:
        raw = await request.body.read()
        body = read_object(request.headers, raw)
        if "model" in body:
            check_model(body, self._config)
        await self._pass(request, responder, raw)

    async def _pass(self, request: Request, responder: Responder, raw: bytes) -> None:
        headers = [(b"content-type", b"application/json")]
        if self._config.engine_api_key:
            headers.append((b"authorization", b"Bearer " + self._config.engine_api_key.encode()))
        passed = UpstreamRequest("POST", request.path.encode(), headers, raw, repeatable=True)
        engines = self._directory.engines.usable()[:_ATTEMPTS]
        if not engines:
            raise Unavailable("no engine of this fleet is up; try again", retry_after_s=5.0)
        for engine in engines:
            outcome = await relay(self._pool, Endpoint.parse(f"http://{engine.http}"), passed, responder)
            if outcome.end is not RelayEnd.NOT_STARTED:
                return
        raise outcome.error or EngineUnreachable("no engine answered; try again", retry_after_s=5.0)
