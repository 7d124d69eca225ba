"""A turn (one request of a conversation), and the reader that makes it from an HTTP request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from router.auth.keys import Key
from router.auth.rate_limits import UNMETERED, Charge
from router.gateway.config import ServedModel, SloClass
from router.gateway.responses.stored_answers import Answers, History
from router.gateway.slo_classes import SloClasses
from router.http import RawHeaders, Request
from router.identity.conversation_ids import normalized_hint
from router.identity.prefix_groups import PrefixGroups
from router.requests.body_parser import Api, BodyParser, Prompt
from router.requests.cost_limits import PromptLimit
from router.requests.fields import UnknownFields, with_fields
from router.requests.forwarded_headers import forwarded
from router.requests.grammars import Grammar
from router.requests.hints import HINT_FIELDS
from router.requests.parser_pool import ParserPool

if TYPE_CHECKING:
    from router.gateway.tracing import TurnTrace

FLOW_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")  # llm-d's

Models: TypeAlias = Mapping[str, ServedModel]  # by name and by alias


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, read and checked."""

    api: Api
    raw: tuple[bytes, ...]  # body for the engine: the client's, in pieces, with the fleet's fields appended
    body: Mapping[str, Any]  # fields of the client's body; None in place of large values
    headers: RawHeaders  # headers that go on to the engine
    space: str  # the caller's name space of conversation ids
    prompt: Prompt
    salt: str  # salt of model and cache: engines find KV of this prompt under the same salt only
    slo_class: SloClass
    arrived_at: float
    trace: "TurnTrace | None" = None  # spans of a sampled turn, where tracing is on
    charge: Charge = UNMETERED
    flow: str = ""  # label of the client; the waiting turns of an owner are served fairly among its flows
    waiting_share: float = 1.0  # share of the waiting places that the owner may take
    grammar: Grammar | None = None  # grammar that an engine compiles for the turn
    history: History | None = None  # in the Responses API: what the request continues
    ignored: tuple[str, ...] = ()  # names of the client's fields that were dropped
    resume: Mapping[str, Any] | None = None  # tells the engine which part of a stream the client has

    @property
    def model(self) -> str:
        """Return the model's name, as the client wrote it."""
        return str(self.body.get("model"))

    @property
    def prompt_bytes(self) -> int:
        return self.prompt.chain.total_bytes + self.prompt.tool_bytes + self.prompt.template_bytes

    @property
    def flex(self) -> bool:
        """Return whether the turn is offline work, which waits for capacity and has no conversation."""
        return self.body.get("service_tier") == "flex"

    @property
    def resumed_tokens(self) -> int:
        """Return the number of generated tokens that a resumed stream adds to its prompt."""
        return sum(map(len, self.resume["outputs"])) if self.resume is not None else 0


class TurnReader:
    """Makes turns from HTTP requests: parses the body, adds the history, chooses the SLO class."""

    def __init__(
        self,
        parser_pool: ParserPool,
        groups: PrefixGroups,
        classes: SloClasses,
        answers: Answers,
        prompt_limit: Callable[[], PromptLimit],
        unknown: UnknownFields,
    ) -> None:
        self._parser_pool, self._groups, self._classes = parser_pool, groups, classes
        self._answers, self._prompt_limit, self._unknown = answers, prompt_limit, unknown

    async def read(
        self,
        api: Api,
        request: Request,
        pieces: tuple[bytes, ...],
        key: Key,
        models: Models,
        charge: Charge,
        now: float,
    ) -> Turn:
        """Return the turn of a request whose body is `pieces`. Raises ApiError for bad input."""
        space = key.owner
        headers = request.headers.as_text()
        parser = BodyParser(
            path=api.target.decode(),
            api=api,
            headers=headers,
            space=space,
            models=frozenset(models),
            limit=self._prompt_limit(),
            unknown=self._unknown,
        )
        history = None
        read = await self._parser_pool.parse(
            replace(parser, items=True) if api is Api.RESPONSES else parser, pieces
        )
        pieces, ignored = read.known_part(pieces), read.ignored
        if api is Api.RESPONSES:
            own_bytes = sum(map(len, pieces))
            pieces, history = await self._answers.with_history(space, pieces, read)
            if request.body.account is not None:  # a history occupies memory for as long as a body
                request.body.account(sum(map(len, pieces)) - own_bytes)
            if history.previous is not None:  # the input is complete now
                read = await self._parser_pool.parse(parser, pieces)
        assert read.prompt is not None
        slo_class = self._classes.choose(space, headers, read.fields)
        added = self._groups.fields(space, read.fields) | dict.fromkeys(read.fields.keys() & HINT_FIELDS)
        added |= self._classes.engine_arguments(slo_class, headers, read.fields)
        return Turn(
            api=api,
            raw=with_fields(pieces, added),
            body=read.fields,
            headers=[*forwarded(request.headers), *(history.headers if history is not None else ())],
            space=space,
            prompt=read.prompt,
            salt=f"{models[str(read.fields['model'])].name}\0{added.get('cache_salt', '')}",
            slo_class=slo_class,
            arrived_at=now,
            charge=charge,
            waiting_share=key.limits.waiting_share or 1.0,
            grammar=read.grammar,
            history=history,
            ignored=ignored,
            flow=next((flow for name in FLOW_HEADERS if (flow := normalized_hint(headers.get(name)))), ""),
        )
