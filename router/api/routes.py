"""From a request to what answers it."""

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from placement.engines import Role
from router.api.callers import Caller, Callers
from router.api.conversations import PREFIX, ConversationRoutes
from router.api.http_counts import HttpCounts
from router.api.passing import PassingRoutes
from router.batch.flex_turns import FlexTurns, is_flex
from router.config import GatewayConfig
from router.dashboard.routes import PREFIX as DASHBOARD
from router.dashboard.routes import Dashboard
from router.directory.client import DirectoryClient
from router.error_shapes import ANTHROPIC
from router.errors import MethodNotAllowed, ModelNotFound, NotFound
from router.http import Handler, Request, Responder, UpstreamPool
from router.life import Life
from router.turn import Api, read_turn

Route = Callable[[Request, Responder], Awaitable[None]]
_JSON = (b"content-type", b"application/json")
_MODELS = "/v1/models"
_MESSAGES = Api.MESSAGES.target.decode()


class Routes:
    """The gateway's handler. `mounts` are handlers by path prefix: the batch API."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        life: Life,
        mounts: Mapping[str, Handler] | None = None,
        flex: FlexTurns | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._directory = directory
        self._life = life
        self._flex = flex
        self._clock = clock
        self._callers = Callers(config)
        self._conversations = ConversationRoutes(directory)
        self._dashboard = Dashboard(config, directory, self._callers)
        self._mounts = tuple((mounts or {}).items())
        self._since = int(time.time())
        self.http_counts: HttpCounts | None = None  # of the server that these routes are the handler of
        passing = PassingRoutes(config, directory, pool)
        self._open: dict[str, dict[str, Route]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }
        self._routes: dict[str, dict[str, Route]] = {
            **{api.target.decode(): {"POST": partial(self._generate, api)} for api in Api},
            "/v1/embeddings": {"POST": passing.embeddings},
            "/tokenize": {"POST": passing.tokens},
            f"{_MESSAGES}/count_tokens": {"POST": passing.tokens},
            "/detokenize": {"POST": passing.tokens},
            _MODELS: {"GET": self._models},
            PREFIX: {"GET": self._named(self._conversations.list)},
        }
        self._below: dict[str, dict[str, Route]] = {
            f"{PREFIX}/": {
                "GET": self._named(self._conversations.get),
                "DELETE": self._named(self._conversations.delete),
            },
            f"{_MODELS}/": {"GET": self._model},
        }

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.path.startswith(_MESSAGES):
            responder.error_shape = ANTHROPIC
        if request.path.startswith(DASHBOARD):
            return await self._dashboard(request, responder)
        methods = self._open.get(request.path)
        if methods is None:
            self._callers.caller(request.headers)
            for prefix, handler in self._mounts:
                if request.path.startswith(prefix):
                    return await handler(request, responder)
            methods = self._routes.get(request.path) or next(
                (found for prefix, found in self._below.items() if request.path.startswith(prefix)), None
            )
        if methods is None:
            raise NotFound(f"there is no {request.path[:200]}; see the README for the API")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise MethodNotAllowed(f"{request.path[:200]} takes {allowed}", allow=allowed)
        return await route(request, responder)

    async def own_page(self, request: Request, responder: Responder) -> None:
        """Health and metrics of this very process: on a port that several share, the system chooses who
        answers."""
        route = self._open.get(request.path, {}).get(request.method)
        if route is None:
            raise NotFound(f"there is no {request.method} {request.path[:200]} here; /metrics is")
        await route(request, responder)

    async def _generate(self, api: Api, request: Request, responder: Responder) -> None:
        arrived_at = self._clock()
        space = self._callers.caller(request.headers).space
        turn = await read_turn(api, request, space, self._config, arrived_at)
        if self._flex is not None and is_flex(turn):
            await self._flex.serve(turn, responder)
        else:
            await self._life.serve(turn, responder)

    def _named(self, route: Callable[[Caller, Request, Responder], Awaitable[None]]) -> Route:
        async def run(request: Request, responder: Responder) -> None:
            await route(self._callers.caller(request.headers), request, responder)

        return run

    async def _models(self, request: Request, responder: Responder) -> None:
        data = [self._shown(name) for model in self._config.models for name in (model.name, *model.aliases)]
        responder.respond(200, orjson.dumps({"object": "list", "data": data}), [_JSON])

    async def _model(self, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(f"{_MODELS}/")
        if self._config.model(name) is None:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")
        responder.respond(200, orjson.dumps(self._shown(name)), [_JSON])

    def _shown(self, name: str) -> dict[str, object]:
        context = max((info.max_context for info in self._directory.engines.infos()), default=None)
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "conserve",
            "max_model_len": context,
        }

    async def _health(self, request: Request, responder: Responder) -> None:
        responder.respond(200, b'{"status":"ok"}', [_JSON])

    async def _ready(self, request: Request, responder: Responder) -> None:
        """Ready to take new conversations: the directory is there, and an engine that can hold them."""
        holding = [info for info in self._directory.engines.usable() if info.role is not Role.PREFILL]
        state = {"directory": self._directory.connected, "engines": len(holding)}
        ready = self._directory.connected and bool(holding)
        responder.respond(200 if ready else 503, orjson.dumps({"ready": ready, **state}), [_JSON])

    async def _metrics(self, request: Request, responder: Responder) -> None:
        if self.http_counts is not None:
            self.http_counts.bring()
        responder.respond(200, generate_latest(), [(b"content-type", CONTENT_TYPE_LATEST.encode())])
