"""Routes of a gateway: the table of paths, and the checks of callers before a route answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import TypeVar

from router.auth.addresses import Addresses
from router.auth.cross_site import refuse_cross_site
from router.auth.keyring import Keyring
from router.auth.keys import Key, StructuredOutputs
from router.auth.owner_shares import OwnerShares
from router.auth.rate_limits import Meters
from router.batch.forwarding import BatchForwarding
from router.batch.routes import PREFIXES as BATCH_PREFIXES
from router.batch.routes import ROUTES as BATCH_ROUTES
from router.directory.api.client import DirectoryClient
from router.errors import (
    ANTHROPIC,
    ApiError,
    Forbidden,
    MethodNotAllowed,
    Misdirected,
    NotFound,
    RateLimited,
    excerpt,
)
from router.gateway import openapi
from router.gateway.config import GatewayConfig
from router.gateway.conversation_routes import (
    CONVERSATIONS,
    RESPONSES,
    ConversationRoutes,
    StoredAnswerRoutes,
)
from router.gateway.dashboard import PREFIX as DASHBOARD
from router.gateway.dashboard import DashboardRoutes
from router.gateway.engine_routes import EngineRoutes
from router.gateway.responses.stored_answers import Answers
from router.gateway.slo_classes import SloClasses
from router.gateway.status_routes import MODELS, ModelRoutes, StatusRoutes
from router.gateway.turn.handler import TurnHandler
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Models, TurnReader
from router.gateway.turn_routes import TurnRoutes
from router.http import Handler, Request, Responder, UpstreamPool
from router.identity.prefix_groups import PrefixGroups
from router.requests.body_parser import Api
from router.requests.cost_limits import PromptLimit
from router.requests.ignored_fields import IgnoredFields
from router.requests.parser_pool import ParserPool
from router.settings import MIB

audit = logging.getLogger("conserve.audit")

_MESSAGES = Api.MESSAGES.target.decode()
_BATCHES, _METRICS = "/v1/batches", "/metrics"
_PROBED = ("/health", "/ready")
REFUSAL_S = 1.0  # seconds before a refusal by a limit is sent; the shortest `retry-after`

KeyedHandler = Callable[[Key, Request, Responder], Awaitable[None]]
AnyHandler = TypeVar("AnyHandler")


class Routes:
    """Handler of a gateway's server: checks the caller, and calls the route of the path."""

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
    ) -> None:
        self._config, self._batch, self._keys, self._meters = config, batch, keys, meters
        self._hosts = frozenset(config.hosts)
        self._address = Addresses(config.trusted_proxies).of
        limits = config.limits
        most = max(1, int(limits.owner_share * limits.connections))
        self._shares = OwnerShares(most, int(limits.bodies_mib * MIB))
        self._models_of = models_of = lru_cache(None)(partial(_models_of, config.models_by_name))
        self._dashboard = DashboardRoutes(config, directory, keys)
        self.status = StatusRoutes(directory)
        groups = PrefixGroups(config.shared_prefixes)

        def prompt_limit() -> PromptLimit:
            return PromptLimit(directory.engines.max_context, limits.prompt_bytes_per_token, limits.answers)

        unknown, ignored = config.unknown_fields, IgnoredFields()
        reader = TurnReader(parser_pool, groups, SloClasses(config), answers, prompt_limit, unknown)
        generating = TurnRoutes(reader, turns, answers, batch, meters, models_of, self._address, ignored)
        parsing = parser_pool, prompt_limit, groups
        tokens = TokenRatio(config.tokens_per_byte).tokens
        passing = EngineRoutes(
            models_of, directory, pool, *parsing, meters, self._address, tokens, unknown, ignored
        )
        conversations, stored = ConversationRoutes(directory, answers), StoredAnswerRoutes(answers)
        models = ModelRoutes(models_of, lambda: directory.engines.max_context)
        self._open: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self.status.health},
            "/ready": {"GET": self.status.ready},
            _METRICS: {"GET": self.status.metrics},
            "/openapi.json": {"GET": self.status.openapi},
        }
        self._exact: dict[str, dict[str, KeyedHandler]] = {
            **{api.target.decode(): {"POST": partial(generating.generate, api)} for api in Api},
            "/v1/embeddings": {"POST": passing.embeddings},
            "/tokenize": {"POST": passing.tokenize},
            f"{_MESSAGES}/count_tokens": {"POST": passing.tokenize},
            "/detokenize": {"POST": passing.tokenize},
            MODELS: {"GET": models.list},
            CONVERSATIONS: {"GET": conversations.list},
        }
        self._prefixes: dict[str, dict[str, KeyedHandler]] = {
            f"{CONVERSATIONS}/": {"GET": conversations.get, "DELETE": conversations.delete},
            f"{MODELS}/": {"GET": models.get},
            RESPONSES: {"GET": stored.get, "DELETE": stored.delete},
        }
        named = {f"{path}{{id}}": methods for path, methods in self._prefixes.items()}
        batches = BATCH_ROUTES if batch is not None else {}
        self.status.description = openapi.document(
            {**self._open, **self._exact, **named, **batches}, config.unknown_fields, limits.answers
        )

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.path.startswith(_MESSAGES):
            responder.error_shape = ANTHROPIC
        known = not self._hosts or request.path in _PROBED  # probes call a pod by its address
        if not known and (name := _host(request)) and name not in self._hosts:
            raise Misdirected(f"this gateway is not called {excerpt(name)!r}: gateway.hosts lists its names")
        methods = self._open.get(request.path)
        if methods is not None:
            if request.path == _METRICS and self._keys.configured:
                self._keys.authenticate(request.headers).check_may_read_metrics()
            await _handler(methods, request)(request, responder)
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
                with self._shares.request(key.owner if key.hash else self._address(request)) as account:
                    request.body.account = account
                    await self._within_limits(key, request, responder)
        except ApiError as error:
            self._audit(key, request, responder, error.status)
            raise
        self._audit(key, request, responder, responder.status)

    async def own_page(self, request: Request, responder: Responder) -> None:
        """Serve health and metrics of this process on a port of its own.

        On a port that several processes share, the system chooses which one answers.
        """
        route = self._open.get(request.path, {}).get(request.method)
        if route is None:
            raise NotFound(f"there is no {request.method} {excerpt(request.path)} here; try GET /metrics")
        await route(request, responder)

    async def _within_limits(self, key: Key, request: Request, responder: Responder) -> None:
        try:
            if request.method not in ("GET", "HEAD"):
                self._meters.request(key, responder, self._address(request))
            await self._answer(key, request, responder)
        except RateLimited:
            await asyncio.sleep(REFUSAL_S)  # a client that retries at once would cost as much as a served one
            raise

    async def _answer(self, key: Key, request: Request, responder: Responder) -> None:
        if self._batch is not None and request.path.startswith(BATCH_PREFIXES):
            if request.path == _BATCHES and request.method == "POST":
                self._check_batches(key)
            await self._batch.handle(request, responder, key)
            return
        methods = self._exact.get(request.path) or next(
            (found for prefix, found in self._prefixes.items() if request.path.startswith(prefix)), None
        )
        if methods is None:
            raise NotFound(f"there is no {excerpt(request.path)}; /openapi.json lists the paths")
        await _handler(methods, request)(key, request, responder)

    def _check_batches(self, key: Key) -> None:
        """Refuse a restricted key, because the batch process does not apply restrictions to a job's lines."""
        refused = key.limits.structured_outputs is StructuredOutputs.REFUSE
        if refused and self._config.key_limits.structured_outputs is not StructuredOutputs.REFUSE:
            raise Forbidden("batches need a key that may use structured outputs", code="batches_not_allowed")
        if len(self._models_of(key.models)) < len(self._models_of(())):
            raise Forbidden("batches need a key for all models of the fleet", code="model_not_allowed")

    def _audit(self, key: Key | None, request: Request, responder: Responder, status: int | None) -> None:
        if not self._config.audit:
            return
        who = (key.id, key.owner) if key is not None else ("-", "-")
        address = self._address(request) or "-"
        conversation = responder.added(b"x-conversation-id").decode() or "-"
        what = request.method, request.path[:200], conversation, status or "-"
        line = "key=%s owner=%s address=%s action=%r path=%r conversation=%s status=%s"
        audit.info(line, *who, address, *what)


def _host(request: Request) -> str:
    """Return the host name that the client called, without a port; empty if it named none."""
    host = (request.headers.text(b"host") or "").lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _handler(methods: Mapping[str, AnyHandler], request: Request) -> AnyHandler:
    """Return the handler of the request's method; HEAD is handled as GET. Raises MethodNotAllowed."""
    handler = methods.get("GET" if request.method == "HEAD" else request.method)
    if handler is None:
        allowed = ", ".join(sorted(methods))
        raise MethodNotAllowed(f"{excerpt(request.path)} takes {allowed}", allow=allowed)
    return handler


def _models_of(served: Models, allowed: tuple[str, ...]) -> Models:
    """Return the models of `served` that a key may use. `allowed` has names or aliases; () allows all."""
    if not allowed:
        return served
    return {name: one for name, one in served.items() if {name, one.name, *one.aliases} & {*allowed}}
