"""From a request to what answers it: the table of paths, who may call, and the answers that are no turns."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import parse_qs

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from placement.engines import Role
from router.auth.addresses import Addresses
from router.auth.cross_site import refuse_cross_site
from router.auth.keyring import Keyring
from router.auth.keys import Key, StructuredOutputs
from router.auth.owner_shares import OwnerShares
from router.auth.rate_limits import Meters
from router.batch.forwarding import BatchForwarding
from router.batch.routes import PREFIXES as BATCH_PREFIXES
from router.batch.routes import ROUTES as BATCH_ROUTES
from router.directory.client import DirectoryClient
from router.errors import (
    ANTHROPIC,
    ApiError,
    BadRequest,
    EngineUnreachable,
    Forbidden,
    MethodNotAllowed,
    Misdirected,
    ModelNotFound,
    NotFound,
    RateLimited,
    Unavailable,
    Unsupported,
)
from router.gateway import openapi
from router.gateway.config import GatewayConfig
from router.gateway.dashboard import PREFIX as DASHBOARD
from router.gateway.dashboard import DashboardRoutes
from router.gateway.responses.stored_answers import Answers
from router.gateway.slo_classes import SloClasses
from router.gateway.turn.handler import TurnHandler
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Models, TurnReader, text_headers
from router.http import (
    Endpoint,
    Handler,
    RelayEnd,
    Request,
    Responder,
    StreamObserver,
    UpstreamPool,
    UpstreamRequest,
    relay,
)
from router.identity.conversation_ids import clean_id, conversation_id, conversation_key
from router.identity.prefix_groups import PrefixGroups
from router.metrics import HttpCounts
from router.requests.body_parser import Api, BodyParser
from router.requests.fields import with_fields
from router.requests.parser_pool import ParserPool
from router.requests.prompt_limit import PromptLimit

audit = logging.getLogger("conserve.audit")

_JSON = (b"content-type", b"application/json")
_MODELS = "/v1/models"
_MESSAGES = Api.MESSAGES.target.decode()
_CONVERSATIONS = "/v1/conversations"
_RESPONSES = f"{Api.RESPONSES.target.decode()}/"
_BATCHES, _METRICS = "/v1/batches", "/metrics"
_PROBED = ("/health", "/ready")
_PAGE = 50
_MAX_PAGE = 200
_ATTEMPTS = 2
REFUSAL_S = 1.0  # before a key that is over its limit is told so: the least `retry-after`

KeyedHandler = Callable[[Key, Request, Responder], Awaitable[None]]


class Routes:
    """The gateway's handler."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        turns: TurnHandler,
        parser_pool: ParserPool,
        keys: Keyring,
        meters: Meters,
        answers: Answers,
        batch: BatchForwarding | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._served = config.models_by_name
        self._hosts, self._audits = frozenset(config.hosts), config.audit
        self._directory = directory
        self._turns = turns
        self._batch, self._answers = batch, answers
        self._clock = clock
        self._keys, self._meters = keys, meters
        self._structured_outputs = config.key_limits.structured_outputs
        self._address = Addresses(config.trusted_proxies).of
        self._models_of = lru_cache(None)(partial(_models_of, self._served))
        self._groups = PrefixGroups(config.shared_prefixes)
        most = max(1, int(config.owner_share * config.limits.max_connections))
        self._shares = OwnerShares(most, config.bodies_bytes)
        self._turn_reader = TurnReader(
            parser_pool, self._groups, SloClasses(config), answers, self._prompt_limit
        )
        stored = AnswerRoutes(answers)
        self._conversations = ConversationRoutes(directory, answers)
        self._dashboard = DashboardRoutes(config, directory, keys)
        self._since = int(time.time())
        self.http_counts: HttpCounts | None = None  # of the server that these routes are the handler of
        tokens = TokenRatio(config.tokens_per_byte).tokens
        charging = meters, self._address, tokens
        self._prompt_bytes_per_token = config.prompt_bytes_per_token
        reading = parser_pool, self._prompt_limit, self._groups
        passing = PassingRoutes(self._models_of, directory, pool, reading, *charging)
        self._open: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            _METRICS: {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
        }
        self._routes: dict[str, dict[str, KeyedHandler]] = {
            **{api.target.decode(): {"POST": partial(self._generate, api)} for api in Api},
            "/v1/embeddings": {"POST": passing.embeddings},
            "/tokenize": {"POST": passing.tokens},
            f"{_MESSAGES}/count_tokens": {"POST": passing.tokens},
            "/detokenize": {"POST": passing.tokens},
            _MODELS: {"GET": self._models},
            _CONVERSATIONS: {"GET": self._conversations.list},
        }
        self._below: dict[str, dict[str, KeyedHandler]] = {
            f"{_CONVERSATIONS}/": {"GET": self._conversations.get, "DELETE": self._conversations.delete},
            f"{_MODELS}/": {"GET": self._model},
            _RESPONSES: {"GET": stored.get, "DELETE": stored.delete},
        }
        named = {f"{path}{{id}}": methods for path, methods in self._below.items()}
        self._described = openapi.document(
            {**self._open, **self._routes, **named, **(BATCH_ROUTES if batch is not None else {})}
        )

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.path.startswith(_MESSAGES):
            responder.error_shape = ANTHROPIC
        known = not self._hosts or request.path in _PROBED  # by a pod's address, say
        if not known and (name := _host(request)) and name not in self._hosts:
            raise Misdirected(f"this gateway is not called {name[:100]!r}: gateway.hosts has its names")
        methods = self._open.get(request.path)
        if methods is not None:
            if request.path == _METRICS and self._keys.configured:
                self._keys.authenticate(request.headers).check_may_read_metrics()
            await _of_method(methods, request)(request, responder)
            return
        key: Key | None = None
        try:
            if request.path.startswith(DASHBOARD):
                key = self._dashboard.caller(request)
                await self._dashboard(request, responder)
            else:
                if self._keys.anonymous:
                    refuse_cross_site(request)
                key = self._keys.authenticate(request.headers)
                key.check_method(request.method)
                with self._shares.request(key.owner if key.hash else self._address(request)) as keep:
                    request.body.account = keep
                    await self._within_limits(key, request, responder)
        except ApiError as refused:
            self._note(key, request, responder, refused.status)
            raise
        self._note(key, request, responder, responder.status)

    async def _within_limits(self, key: Key, request: Request, responder: Responder) -> None:
        try:
            if request.method not in ("GET", "HEAD"):
                self._meters.request(key, responder, self._address(request))
            await self._answer(key, request, responder)
        except RateLimited:
            await asyncio.sleep(REFUSAL_S)  # or asking again at once would cost as much as being served
            raise

    def _note(self, key: Key | None, request: Request, responder: Responder, status: int | None) -> None:
        if not self._audits:
            return
        who = (key.id, key.owner) if key is not None else ("-", "-")
        address = self._address(request) or "-"
        conversation = responder.added(b"x-conversation-id").decode() or "-"
        what = request.method, request.path[:200], conversation, status or "-"
        line = "key=%s owner=%s address=%s action=%r path=%r conversation=%s status=%s"
        audit.info(line, *who, address, *what)

    async def _answer(self, key: Key, request: Request, responder: Responder) -> None:
        if self._batch is not None and request.path.startswith(BATCH_PREFIXES):
            if request.path == _BATCHES and request.method == "POST":
                self._check_batches(key)
            await self._batch.handle(request, responder, key)
            return
        methods = self._routes.get(request.path) or next(
            (found for prefix, found in self._below.items() if request.path.startswith(prefix)), None
        )
        if methods is None:
            raise NotFound(f"there is no {request.path[:200]}; see the README for the API")
        await _of_method(methods, request)(key, request, responder)

    def _check_batches(self, key: Key) -> None:
        """Refuse a key that may do less than others: a process that knows no keys reads the lines."""
        refused = key.limits.structured_outputs is StructuredOutputs.REFUSE
        if refused and self._structured_outputs is not StructuredOutputs.REFUSE:
            raise Forbidden("batches take a key that may use structured outputs", code="batches_not_allowed")
        if len(self._models_of(key.models)) < len(self._served):
            raise Forbidden("batches take a key for all models of the fleet", code="model_not_allowed")

    async def own_page(self, request: Request, responder: Responder) -> None:
        """Health and metrics of this very process: on a port that several share, the system chooses who
        answers."""
        route = self._open.get(request.path, {}).get(request.method)
        if route is None:
            raise NotFound(f"there is no {request.method} {request.path[:200]} here; /metrics is")
        await route(request, responder)

    def _prompt_limit(self) -> PromptLimit:
        return PromptLimit(self._directory.engines.max_context, self._prompt_bytes_per_token)

    async def _generate(self, api: Api, key: Key, request: Request, responder: Responder) -> None:
        arrived_at = self._clock()
        models = self._models_of(key.models)
        pieces = await request.body.read_pieces()
        with self._meters.turn(key, responder, self._address(request)) as charge:
            turn = await self._turn_reader.read(api, request, pieces, key.owner, models, arrived_at)
            if turn.grammar is not None:
                self._meters.grammar(key, turn.grammar, self._address(request))
            if self._batch is not None and turn.flex:
                charge.reserve(self._turns.binder.prompt_tokens(turn))  # its end is not seen here
                await self._batch.flex(turn, responder, self._answers.observer(turn.space, turn.history))
                if responder.status not in (None, 200):
                    charge.refund()
            else:
                share = key.limits.waiting_share or 1.0
                await self._turns.serve(replace(turn, charge=charge, waiting_share=share), responder)

    async def _models(self, key: Key, request: Request, responder: Responder) -> None:
        data = [self._shown(name) for name in self._models_of(key.models)]
        responder.respond(200, orjson.dumps({"object": "list", "data": data}), [_JSON])

    async def _model(self, key: Key, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(f"{_MODELS}/")
        if name not in self._models_of(key.models):
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

    async def _openapi(self, request: Request, responder: Responder) -> None:
        responder.respond(200, self._described, [_JSON])

    async def _metrics(self, request: Request, responder: Responder) -> None:
        if self.http_counts is not None:
            self.http_counts.bring()
        responder.respond(200, generate_latest(), [(b"content-type", CONTENT_TYPE_LATEST.encode())])


def _host(request: Request) -> str:
    """Without its port; empty where a client says none."""
    said = (request.headers.text(b"host") or "").lower()
    return said[1:].partition("]")[0] if said.startswith("[") else said.partition(":")[0]


_AnyHandler = TypeVar("_AnyHandler")


def _of_method(methods: Mapping[str, _AnyHandler], request: Request) -> _AnyHandler:
    route = methods.get("GET" if request.method == "HEAD" else request.method)
    if route is None:
        allowed = ", ".join(sorted(methods))
        raise MethodNotAllowed(f"{request.path[:200]} takes {allowed}", allow=allowed)
    return route


def _models_of(served: Models, allowed: tuple[str, ...]) -> Models:
    """Those that a key may use; it names a model by any of its names."""
    if not allowed:
        return served
    return {name: one for name, one in served.items() if {name, one.name, *one.aliases} & {*allowed}}


class AnswerRoutes:
    """GET and DELETE /v1/responses/{id}: answers that are stored."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def get(self, key: Key, request: Request, responder: Responder) -> None:
        found = await self._answers.response(key.owner, request.path.removeprefix(_RESPONSES))
        if found is None:
            raise NotFound("no such response is stored", code="response_not_found")
        responder.respond(200, found, [_JSON])

    async def delete(self, key: Key, request: Request, responder: Responder) -> None:
        name = request.path.removeprefix(_RESPONSES)
        if not await self._answers.delete(key.owner, name):
            raise NotFound("no such response is stored", code="response_not_found")
        gone = {"id": name, "object": "response", "deleted": True}
        responder.respond(200, orjson.dumps(gone), [_JSON])


class ConversationRoutes:
    """GET and DELETE /v1/conversations[/{id}]: what the directory knows of a caller's conversations."""

    def __init__(self, directory: DirectoryClient, answers: Answers) -> None:
        self._directory, self._answers = directory, answers

    async def get(self, key: Key, request: Request, responder: Responder) -> None:
        found = await self._directory.describe(_conversation(key, request))
        if found is None:
            raise _unknown()
        responder.respond(200, orjson.dumps(_shown(found)), [_JSON])

    async def delete(self, key: Key, request: Request, responder: Responder) -> None:
        conversation = _conversation(key, request)
        known = await self._directory.end(conversation, "deleted")
        had_history = await self._answers.end_conversation(key.owner, conversation_id(conversation), known)
        if not (known or had_history):
            raise _unknown()
        gone = {"id": conversation_id(conversation), "object": "conversation.deleted", "deleted": True}
        responder.respond(200, orjson.dumps(gone), [_JSON])

    async def list(self, key: Key, request: Request, responder: Responder) -> None:
        """Least recently used first; `after` is the `last_id` of the page before. An admin sees all keys."""
        query = {name: values[-1] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        limit = _limit(query.get("limit", str(_PAGE)))
        prefix = "" if key.admin else f"{key.owner}:"
        after = query.get("after", "")
        page = await self._directory.page(prefix, f"{prefix}{after}" if after else "", limit + 1)
        shown = [_shown(found, with_space=key.admin) for found in page[:limit]]
        answer = {
            "object": "list",
            "data": shown,
            "has_more": len(page) > limit,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
        }
        responder.respond(200, orjson.dumps(answer), [_JSON])


def _conversation(key: Key, request: Request) -> str:
    cleaned = clean_id(request.path.removeprefix(f"{_CONVERSATIONS}/"), "the conversation id")
    if cleaned is None:
        raise _unknown()
    return conversation_key(key.owner, cleaned)


def _limit(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= _MAX_PAGE:
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
        models_of: Callable[[tuple[str, ...]], Models],
        directory: DirectoryClient,
        pool: UpstreamPool,
        reading: tuple[ParserPool, Callable[[], PromptLimit], PrefixGroups],
        meters: Meters,
        address: Callable[[Request], str],
        tokens: Callable[[int], int],
    ) -> None:
        """`address`: a caller's; `tokens`: what so many bytes are estimated at."""
        self._models_of = models_of
        self._meters, self._address, self._estimate = meters, address, tokens
        self._parser_pool, self._prompt_limit, self._groups = reading
        self._directory = directory
        self._pool = pool

    async def embeddings(self, key: Key, request: Request, responder: Responder) -> None:
        raw, body = await self._read(key, request)
        model = self._models_of(key.models).get(str(body.get("model")))
        if model is None:
            raise BadRequest("model must be the name of a model", param="model")
        if not model.embeddings:
            raise Unsupported(
                f"the model {model.name!r} generates text and has no embeddings; ask a model that has",
                param="model",
            )
        sent, observer = with_fields(raw, self._groups.fields(key.owner, body)), StreamObserver()
        with self._meters.turn(key, responder, self._address(request)) as charge:
            charge.reserve(self._estimate(sum(map(len, raw))))
            charge.computing = True
            end = await self._pass(request, responder, sent, observer)
            seen = observer.observation()
            if seen.status == 200:
                charge.settle(seen.usage.prompt_tokens if seen.usage else None, 0)
            elif end is not RelayEnd.CLIENT_GONE:
                charge.refund()

    async def tokens(self, key: Key, request: Request, responder: Responder) -> None:
        raw, _ = await self._read(key, request)
        await self._pass(request, responder, raw)

    async def _read(self, key: Key, request: Request) -> tuple[tuple[bytes, ...], Mapping[str, Any]]:
        raw = await request.body.read_pieces()
        asked = BodyParser(
            path=request.path,
            api=None,
            headers=text_headers(request.headers),
            space=key.owner,
            models=frozenset(self._models_of(key.models)),
            limit=self._prompt_limit(),
        )
        read = await self._parser_pool.parse(asked, raw)
        return raw, read.fields

    async def _pass(
        self,
        request: Request,
        responder: Responder,
        raw: tuple[bytes, ...],
        observer: StreamObserver | None = None,
    ) -> RelayEnd:
        passed = UpstreamRequest("POST", request.path.encode(), [_JSON], raw, repeatable=True)
        engines = self._directory.engines.usable()[:_ATTEMPTS]
        if not engines:
            raise Unavailable("no engine of this fleet is up; try again", retry_after_s=5.0)
        for engine in engines:
            outcome = await relay(self._pool, Endpoint.parse(engine.http), passed, responder, observer)
            if outcome.end is not RelayEnd.NOT_STARTED:
                return outcome.end
        raise outcome.error or EngineUnreachable("no engine answered; try again", retry_after_s=5.0)
