"""Routes of requests that belong to no conversation, and are passed to any usable engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.auth.keys import Key
from router.auth.rate_limits import Meters
from router.directory.api.client import DirectoryClient
from router.errors import JSON_TYPE, BadRequest, EngineUnreachable, Unavailable, Unsupported
from router.gateway.turn.turn import Models
from router.http import (
    Endpoint,
    RelayEnd,
    Request,
    Responder,
    StreamObserver,
    UpstreamPool,
    UpstreamRequest,
    relay,
)
from router.identity.prefix_groups import PrefixGroups
from router.requests.body_parser import BodyParser
from router.requests.cost_limits import PromptLimit
from router.requests.fields import UnknownFields, with_fields
from router.requests.ignored_fields import HEADER, IgnoredFields
from router.requests.parser_pool import ParserPool

_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class EngineRoutes:
    """Passes requests for embeddings and tokenisation, which have no conversation, to a usable engine."""

    models_of: Callable[[tuple[str, ...]], Models]  # returns the models that a key's `models` allow
    directory: DirectoryClient
    pool: UpstreamPool
    parser_pool: ParserPool
    prompt_limit: Callable[[], PromptLimit]
    groups: PrefixGroups
    meters: Meters
    address: Callable[[Request], str]  # returns a caller's address
    tokens: Callable[[int], int]  # estimates how many tokens a number of bytes has
    unknown: UnknownFields
    ignored: IgnoredFields

    async def embeddings(self, key: Key, request: Request, responder: Responder) -> None:
        """Serve an embeddings request, and count it against the limits of its key."""
        raw, body = await self._read(key, request, responder)
        model = self.models_of(key.models).get(str(body.get("model")))
        if model is None:
            raise BadRequest("model must be the name of a model", param="model")
        if not model.embeddings:
            raise Unsupported(
                f"the model {model.name!r} generates text and no embeddings; name a model for embeddings",
                param="model",
            )
        sent, observer = with_fields(raw, self.groups.fields(key.owner, body)), StreamObserver()
        with self.meters.turn(key, responder, self.address(request)) as charge:
            charge.reserve(self.tokens(sum(map(len, raw))))
            charge.computing = True
            end = await self._pass(request, responder, sent, observer)
            seen = observer.observation()
            if seen.status == 200:
                charge.settle(seen.usage.prompt_tokens if seen.usage else None, 0)
            elif end is not RelayEnd.CLIENT_GONE:
                charge.refund()

    async def tokenize(self, key: Key, request: Request, responder: Responder) -> None:
        """Serve a request to tokenise, detokenise or count tokens. It does not count against token limits."""
        raw, _ = await self._read(key, request, responder)
        await self._pass(request, responder, raw)

    async def _read(
        self, key: Key, request: Request, responder: Responder
    ) -> tuple[tuple[bytes, ...], Mapping[str, Any]]:
        raw = await request.body.read_pieces()
        parser = BodyParser(
            path=request.path,
            api=None,
            headers=request.headers.as_text(),
            space=key.owner,
            models=frozenset(self.models_of(key.models)),
            limit=self.prompt_limit(),
            unknown=self.unknown,
        )
        parsed = await self.parser_pool.parse(parser, raw)
        if parsed.ignored:
            responder.add_header(HEADER, self.ignored.record(key.id, request.path, parsed.ignored))
        return parsed.known_part(raw), parsed.fields

    async def _pass(
        self,
        request: Request,
        responder: Responder,
        raw: tuple[bytes, ...],
        observer: StreamObserver | None = None,
    ) -> RelayEnd:
        passed = UpstreamRequest("POST", request.path.encode(), [JSON_TYPE], raw, repeatable=True)
        engines = self.directory.engines.usable()[:_ATTEMPTS]
        if not engines:
            raise Unavailable("no engine of this fleet is up; try again", retry_after_s=5.0)
        for engine in engines:
            outcome = await relay(self.pool, Endpoint.parse(engine.http), passed, responder, observer)
            if outcome.end is not RelayEnd.NOT_STARTED:
                return outcome.end
        raise outcome.error or EngineUnreachable("no engine answered; try again", retry_after_s=5.0)
