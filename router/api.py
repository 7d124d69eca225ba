"""From a request to what answers it: the table of paths, who may call, and the answers that are no turns."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qs

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from placement.engines import Role
from router.batch.forwarding import PREFIXES as BATCH_PREFIXES
from router.batch.forwarding import BatchForwarding
from router.classes import Classes
from router.config import GatewayConfig
from router.dashboard import PREFIX as DASHBOARD
from router.dashboard import DashboardRoutes
from router.directory.client import DirectoryClient
from router.errors import (
    ANTHROPIC,
    BadRequest,
    EngineUnreachable,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Unauthorized,
    Unavailable,
    Unsupported,
)
from router.fields import with_fields
from router.http import (
    Endpoint,
    Handler,
    Headers,
    RelayEnd,
    Request,
    Responder,
    UpstreamPool,
    UpstreamRequest,
    relay,
)
from router.identity import PrefixGroups, clean_id, conversation_id, conversation_key, namespace
from router.life import Life
from router.metrics import HttpCounts
from router.readers import Readers
from router.reading import Api, Reading
from router.shares import Shares
from router.turn import Models, read_turn, text_headers

_JSON = (b"content-type", b"application/json")
_MODELS = "/v1/models"
_MESSAGES = Api.MESSAGES.target.decode()
_CONVERSATIONS = "/v1/conversations"
_PAGE = 50
_MAX_PAGE = 200
_REMEMBERED_KEYS = 1024
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, by API key: the name space of its conversation ids, and whether it sees those of others."""

    space: str
    admin: bool


class Callers:
    """The API keys of a fleet."""

    def __init__(self, config: GatewayConfig) -> None:
        self._admins = _digests(config.admin_keys)
        self._allowed = _digests(config.api_keys) | self._admins if config.api_keys else None
        self._of_key = lru_cache(_REMEMBERED_KEYS)(self._caller)

    def caller(self, headers: Headers) -> Caller:
        """Without a list of keys any may come, and only scopes ids. Keys are compared by their digests."""
        scheme, _, given = (headers.text(b"authorization") or "").partition(" ")
        return self._of_key(given.strip() if scheme.lower() == "bearer" else headers.text(b"x-api-key") or "")

    def _caller(self, key: str) -> Caller:
        digest = sha256(key.encode()).digest()
        if self._allowed is not None and digest not in self._allowed:
            raise Unauthorized(
                "the API key is missing or not known; send it as `Authorization: Bearer KEY`"
                if not key
                else "the API key is not known to this fleet"
            )
        return Caller(namespace(key), digest in self._admins)

    def is_admin(self, key: str) -> bool:
        return sha256(key.encode()).digest() in self._admins


def _digests(keys: tuple[str, ...]) -> frozenset[bytes]:
    return frozenset(sha256(key.encode()).digest() for key in keys)


class Routes:
    """The gateway's handler."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        life: Life,
        readers: Readers,
        batch: BatchForwarding | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served = config.models_by_name
        self._directory = directory
        self._life = life
        self._readers = readers
        self._batch = batch
        self._clock = clock
        self._callers = Callers(config)
        self._groups = PrefixGroups(config.shared_prefixes)
        self._shares = Shares(max(1, int(config.owner_share * config.limits.max_connections)))
        self._classes = Classes(config)
        self._conversations = ConversationRoutes(directory)
        self._dashboard = DashboardRoutes(config, directory, self._callers.is_admin)
        self._since = int(time.time())
        self.http_counts: HttpCounts | None = None  # of the server that these routes are the handler of
        passing = PassingRoutes(self._served, directory, pool, readers, self._callers, self._groups)
        self._open: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }
        self._routes: dict[str, dict[str, Handler]] = {
            **{api.target.decode(): {"POST": partial(self._generate, api)} for api in Api},
            "/v1/embeddings": {"POST": passing.embeddings},
            "/tokenize": {"POST": passing.tokens},
            f"{_MESSAGES}/count_tokens": {"POST": passing.tokens},
            "/detokenize": {"POST": passing.tokens},
            _MODELS: {"GET": self._models},
            _CONVERSATIONS: {"GET": self._named(self._conversations.list)},
        }
        self._below: dict[str, dict[str, Handler]] = {
            f"{_CONVERSATIONS}/": {
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
            caller = self._callers.caller(request.headers)
            with self._shares.one(caller.space):
                return await self._answer(caller, request, responder)
        return await self._route(methods, request, responder)

    async def _answer(self, caller: Caller, request: Request, responder: Responder) -> None:
        if self._batch is not None and request.path.startswith(BATCH_PREFIXES):
            return await self._batch.handle(request, responder, caller.space)
        methods = self._routes.get(request.path) or next(
            (found for prefix, found in self._below.items() if request.path.startswith(prefix)), None
        )
        if methods is None:
            raise NotFound(f"there is no {request.path[:200]}; see the README for the API")
        return await self._route(methods, request, responder)

    async def _route(self, methods: Mapping[str, Handler], request: Request, responder: Responder) -> None:
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            raise MethodNotAllowed(f"{request.path[:200]} takes {allowed}", allow=allowed)
        await route(request, responder)

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
        known = self._served, self._groups, self._classes, arrived_at, self._readers
        turn = await read_turn(api, request, space, *known, self._directory.engines.max_context)
        if self._batch is not None and turn.flex:
            await self._batch.flex(turn, responder)
        else:
            await self._life.serve(turn, responder)

    def _named(self, route: Callable[[Caller, Request, Responder], Awaitable[None]]) -> Handler:
        async def run(request: Request, responder: Responder) -> None:
            await route(self._callers.caller(request.headers), request, responder)

        return run

    async def _models(self, request: Request, responder: Responder) -> None:
        data = [self._shown(name) for name in self._served]
        responder.respond(200, orjson.dumps({"object": "list", "data": data}), [_JSON])

    async def _model(self, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(f"{_MODELS}/")
        if name not in self._served:
            raise ModelNotFound(f"the model {name[:100]!r} does not exist", param="model")
        responder.respond(200, orjson.dumps(self._shown(name)), [_JSON])

    def _shown(self, name: str) -> dict[str, object]:
                return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "conserve",
            "max_model_len": self._directory.engines.max_context or None,
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


class ConversationRoutes:
    """GET and DELETE /v1/conversations[/{id}]: what the directory knows of a caller's conversations."""

    def __init__(self, directory: DirectoryClient) -> None:
        self._directory = directory

    async def get(self, caller: Caller, request: Request, responder: Responder) -> None:
        key = _key(caller, request)
        found = await self._directory.describe(key)
        if found is None:
            raise _unknown()
        responder.respond(200, orjson.dumps(_shown(found)), [_JSON])

    async def delete(self, caller: Caller, request: Request, responder: Responder) -> None:
        key = _key(caller, request)
        known = await self._directory.end(key, "deleted")
        if not known:
            raise _unknown()
        gone = {"id": conversation_id(key), "object": "conversation.deleted", "deleted": True}
        responder.respond(200, orjson.dumps(gone), [_JSON])

    async def list(self, caller: Caller, request: Request, responder: Responder) -> None:
        """Least recently used first; `after` is the `last_id` of the page before. An admin sees all keys."""
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        limit = _limit(query.get("limit", str(_PAGE)))
        prefix = "" if caller.admin else f"{caller.space}:"
        after = query.get("after", "")
        page = await self._directory.page(prefix, f"{prefix}{after}" if after else "", limit + 1)
        shown = [_shown(found, with_space=caller.admin) for found in page[:limit]]
        answer = {
            "object": "list",
            "data": shown,
            "has_more": len(page) > limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }
        responder.respond(200, orjson.dumps(answer), [_JSON])


def _key(caller: Caller, request: Request) -> str:
    cleaned = clean_id(request.path.removeprefix(f"{_CONVERSATIONS}/"), "the conversation id")
    if cleaned is None:
        raise _unknown()
    return conversation_key(caller.space, cleaned)


def _limit(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= _MAX_PAGE:
        raise BadRequest(f"limit must be a number from 1 to {_MAX_PAGE}", param="limit")
    return int(text)


def _shown(found: dict[str, Any], *, with_space: bool = False) -> dict[str, Any]:
    """Keys hold the caller's name space; only an admin needs to see it."""
    rest = {name: value for name, value in found.items() if name not in ("key", "parent")}
    show = str if with_space else conversation_id
    parent = found["parent"]
    return {
        "id": show(found["key"]),
        "object": "conversation",
        "parent": show(parent) if parent else None,
        **rest,
    }


def _unknown() -> NotFound:
    return NotFound("there is no such conversation, or it ended long ago", code="conversation_not_found")


class PassingRoutes:
    """Requests that belong to no conversation, answered by whichever engine is least busy."""

    def __init__(
        self,
        models: Models,
        directory: DirectoryClient,
        pool: UpstreamPool,
        readers: Readers,
        callers: Callers,
        groups: PrefixGroups,
    ) -> None:
        self._models = models
        self._readers = readers
        self._callers, self._groups = callers, groups
        self._directory = directory
        self._pool = pool

    async def embeddings(self, request: Request, responder: Responder) -> None:
        raw, body, caller = await self._read(request)
        model = self._models.get(str(body.get("model")))
        if model is None:
            raise BadRequest("model must be the name of a model", param="model")
        if not model.embeddings:
            raise Unsupported(
                f"the model {model.name!r} generates text and has no embeddings; ask a model that has",
                param="model",
            )
        await self._pass(request, responder, with_fields(raw, self._groups.fields(caller.space, body)))

    async def tokens(self, request: Request, responder: Responder) -> None:
        raw, _, _ = await self._read(request)
        await self._pass(request, responder, raw)

    async def _read(self, request: Request) -> tuple[tuple[bytes, ...], Mapping[str, Any], Caller]:
        caller = self._callers.caller(request.headers)
        raw = await request.body.read_pieces()
        asked = Reading(
            path=request.path,
            api=None,
            headers=text_headers(request.headers),
            space=caller.space,
            models=frozenset(self._models),
            max_context=self._directory.engines.max_context,
        )
        read = await self._readers.read(asked, raw)
        return raw, read.fields, caller

    async def _pass(self, request: Request, responder: Responder, raw: tuple[bytes, ...]) -> None:
        passed = UpstreamRequest("POST", request.path.encode(), [_JSON], raw, repeatable=True)
        engines = self._directory.engines.usable()[:_ATTEMPTS]
        if not engines:
            raise Unavailable("no engine of this fleet is up; try again", retry_after_s=5.0)
        for engine in engines:
            outcome = await relay(self._pool, Endpoint.parse(engine.http), passed, responder)
            if outcome.end is not RelayEnd.NOT_STARTED:
                return
        raise outcome.error or EngineUnreachable("no engine answered; try again", retry_after_s=5.0)
