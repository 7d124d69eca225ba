"""A turn: one request of a conversation read and checked, its SLO class, its size, and what its end says.

Sizes are known when a turn arrives, without a tokenizer: tokens from bytes, by the ratio that the engines'
own counts show. TTFET, end-to-end time and last-turn TBT belong to an *answer*: from a user's message, over
any number of tool turns, to the turn that speaks to the user (`placement/objectives.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from xxhash import xxh3_128_digest

from placement.objectives import tbt_s, ttfet_s
from placement.routing.prefix_map import PromptPrefix
from router import metrics
from router.auth.rate_limits import FREE, Charge
from router.directory.cache import Known
from router.errors import BadRequest
from router.gateway.config import DEFAULT_CLASS, GatewayConfig, ServedModel, SloClass, SloTargets
from router.gateway.responses.stored_answers import Answers, History
from router.http import Headers, Observation, RawHeaders, RelayEnd, RelayOutcome, Request
from router.identity.conversation_ids import PrefixGroups, hint_of
from router.metrics import SLO_TARGETS_RAISED
from router.requests.fields import positive, with_fields
from router.requests.forwarded_headers import forwarded
from router.requests.grammars import Grammar
from router.requests.parser_pool import Readers
from router.requests.parsing import HINT_FIELDS, Api, Prompt, Reading
from router.requests.prompt_limit import PromptLimit

CLASS_HEADER, CLASS_FIELD = "x-slo-class", "slo_class"
OBJECTIVES = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
_TTFT, _TBT = "slo_ttft_ms", "slo_tbt_ms"
TARGETS = {  # of llm-d: header to the engine's argument
    "x-slo-ttft-ms": _TTFT,
    "x-llm-d-slo-ttft-ms": _TTFT,
    "x-slo-tpot-ms": _TBT,
    "x-llm-d-slo-tpot-ms": _TBT,
}
PRIORITY_S = 1.0  # what a level of a hint's priority is worth
_MILLISECONDS = positive(24 * 3600 * 1000.0)


class Classes:
    """SLO classes: which one a turn is of, and what engines are told of it.

    A class is named by the header `X-SLO-Class` or the body's `slo_class`; by llm-d's header of an objective,
    if one is called so; by the caller, where the fleet file says so; else it is `default`. A class is worth
    so many seconds: turns that wait are served the better first, and lesser ones at least once in as long
    (`placement/priorities.py`). A hint's priority, which anybody may send, is worth something where turns of
    one owner wait in the directory; engines hear of classes only. A class's targets are the tightest that
    its turns may ask for.
    """

    def __init__(self, config: GatewayConfig) -> None:
        default = SloClass(DEFAULT_CLASS, config.slo)
        self._by_name = {default.name: default} | {one.name: one for one in config.classes}
        self._ttft_s, self._tbt_s = config.ttft_s, config.tbt_s
        self._of_owner = {owner: one for one in config.classes for owner in one.owners}

    def choose(self, owner: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> SloClass:
        own = self._of_owner.get(owner, self._by_name[DEFAULT_CLASS])
        said = headers.get(CLASS_HEADER) or body.get(CLASS_FIELD)
        if said:
            named = self._by_name.get(said) if isinstance(said, str) else None
            if named is None:
                names = ", ".join(sorted(name for name, one in self._by_name.items() if one.open_to(owner)))
                raise BadRequest(f"{CLASS_FIELD} is none of this fleet's classes: {names}", param=CLASS_FIELD)
            if not named.open_to(owner):
                raise BadRequest(
                    f"the class {named.name} is for others: leave {CLASS_FIELD} out", param=CLASS_FIELD
                )
            return named
        for header in OBJECTIVES:
            objective = self._by_name.get(headers.get(header, ""))
            if objective is not None and objective.open_to(owner):
                return objective
        return own

    def engine_arguments(
        self, of: SloClass, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is said in a body in the place of its own `vllm_xargs`; what a client asks for itself stays,
        but for less time than its class has: an engine's iterations are as short as its tightest turn wants
        them, at the cost of all, and it aborts offline ones for prompts that would be late."""
        said: dict[str, Any] = {}
        least = self._least(of)
        if _own(of).last_turn_tbt_s:
            said[_TBT] = least[_TBT]
        for header, argument in TARGETS.items():
            if header in headers:
                said[argument] = _milliseconds(header, headers[header])
        if of.queue_weight:
            said["queue_weight"] = of.queue_weight
        asked = body.get("vllm_xargs") or {}
        said |= asked
        raised = {name: least_ms for name, least_ms in least.items() if said.get(name, math.inf) < least_ms}
        if raised:
            said |= raised
            SLO_TARGETS_RAISED.labels(of.name).inc()
        return {"vllm_xargs": said} if said != asked else {}

    def _least(self, of: SloClass) -> dict[str, float]:
        """Milliseconds. A longer TTFET of the class does not count: engines have their own TTFT for all."""
        ttft_s = min(_own(of).ttfet_s or math.inf, self._ttft_s or 0.0)
        return {_TTFT: ttft_s * 1000, _TBT: (_own(of).last_turn_tbt_s or self._tbt_s or 0.0) * 1000}


def _own(of: SloClass) -> SloTargets:
    """Those of `default` are of answers to users: engines have theirs."""
    return SloTargets() if of.name == DEFAULT_CLASS else of.targets


def _milliseconds(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    _MILLISECONDS(header, value)
    return value


if TYPE_CHECKING:
    from router.gateway.tracing import TurnTrace

FLOW_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")  # llm-d's

Models: TypeAlias = Mapping[str, ServedModel]  # by every name they answer to


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, read and checked."""

    api: Api
    raw: tuple[bytes, ...]  # for the engine: the client's, in pieces, with what the fleet sets
    body: Mapping[str, Any]  # None in the place of values that are large
    headers: RawHeaders  # for the engine
    space: str  # scope of the caller's conversation ids
    prompt: Prompt
    salt: str  # of a served model and a cache: under another an engine finds nothing of this prompt
    slo_class: SloClass
    arrived_at: float
    trace: "TurnTrace | None" = None  # of a sampled turn, where tracing is on
    charge: Charge = FREE
    flow: str = ""  # of its owner's, which are served fairly among each other
    waiting_share: float = 1.0  # of the places where turns wait, for its owner's
    grammar: Grammar | None = None  # that an engine compiles for it
    history: History | None = None  # of the Responses API
    resume: Mapping[str, Any] | None = None  # for the engine: what of a stream the client has already

    @property
    def model(self) -> str:
        """As the client names it: one of those that are served."""
        return str(self.body.get("model"))

    @property
    def prompt_bytes(self) -> int:
        return self.prompt.chain.total_bytes + self.prompt.tool_bytes

    @property
    def flex(self) -> bool:
        """Offline work: it waits for capacity and belongs to no conversation."""
        return self.body.get("service_tier") == "flex"

    @property
    def resumed_tokens(self) -> int:
        """That another engine generated: in the prompt of the one that goes on."""
        return sum(map(len, self.resume["outputs"])) if self.resume is not None else 0


async def read_turn(
    api: Api,
    request: Request,
    pieces: tuple[bytes, ...],
    space: str,
    models: Models,
    groups: PrefixGroups,
    classes: Classes,
    now: float,
    readers: Readers,
    limit: PromptLimit,
    answers: Answers,
) -> Turn:
    """`pieces`: of the request's body."""
    history, headers = None, text_headers(request.headers)
    asked = Reading(api.target.decode(), api, headers, space, frozenset(models), limit)
    if api is not Api.RESPONSES:
        read = await readers.read(asked, pieces)
    else:
        read = await readers.read(replace(asked, items=True), pieces)
        own_bytes = sum(map(len, pieces))
        pieces, history = await answers.with_history(space, pieces, read)
        if request.body.account is not None:  # a history is kept as long as a body
            request.body.account(sum(map(len, pieces)) - own_bytes)
        if history.previous is not None:  # now there is all of the input
            read = await readers.read(asked, pieces)
    prompt = read.prompt
    assert prompt is not None
    slo_class = classes.choose(space, headers, read.fields)
    ours = groups.fields(space, read.fields) | dict.fromkeys(read.fields.keys() & HINT_FIELDS)
    ours |= classes.engine_arguments(slo_class, headers, read.fields)
    return Turn(
        api=api,
        raw=with_fields(pieces, ours),
        body=read.fields,
        headers=[*forwarded(request.headers), *(history.headers if history is not None else ())],
        space=space,
        prompt=prompt,
        salt=f"{models[str(read.fields['model'])].name}\0{ours.get('cache_salt', '')}",
        slo_class=slo_class,
        arrived_at=now,
        grammar=read.grammar,
        history=history,
        flow=next((found for name in FLOW_HEADERS if (found := hint_of(headers.get(name)))), ""),
    )


def text_headers(headers: Headers) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in headers:
        fields.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return fields


_WEIGHT = 0.2  # of a new observation
_LEAST_BYTES = 64  # shorter prompts are mostly the chat template


class TokenRatio:
    """Tokens a byte of text, as the engines' own counts show them, and the sizes that follow from it.

    Only text teaches it: an image's tokens do not follow from its bytes (`chains.MEDIA_BYTES`), and token ids
    are counted."""

    def __init__(self, tokens_per_byte: float) -> None:
        self._ratio = tokens_per_byte
        self._learned = False

    def learn(self, turn: Turn, tokens: int) -> None:
        prompt, size = turn.prompt, turn.prompt_bytes
        if size < _LEAST_BYTES or tokens <= 0 or prompt.chain.media or prompt.exact_tokens is not None:
            return
        seen = tokens / size
        self._ratio = self._ratio + _WEIGHT * (seen - self._ratio) if self._learned else seen
        self._learned = True

    def tokens(self, size: int) -> int:
        return int(size * self._ratio)

    def prompt_tokens(self, turn: Turn, max_context: int) -> int:
        """Never above what an engine takes."""
        exact = turn.prompt.exact_tokens
        estimate = exact if exact is not None else self.tokens(turn.prompt_bytes)
        estimate += turn.resumed_tokens
        return max(1, min(estimate, max_context) if max_context else estimate)

    def prefixes(self, turn: Turn) -> tuple[PromptPrefix, ...]:
        """Return the prefixes of its prompt that other conversations may share."""
        salt = turn.salt.encode("utf-8", "surrogatepass")
        return tuple(
            PromptPrefix(xxh3_128_digest(digest + salt), self.tokens(size + turn.prompt.tool_bytes))
            for digest, size in turn.prompt.prefixes
        )

    def uncached_tokens(self, turn: Turn, known: Known, matched_bytes: int) -> int:
        """What the decoder would have to compute, from observed sizes only.

        `matched_bytes` of the prompt were in an earlier request of this conversation, and what the decoder
        generated since is in its KV too. Nothing matched: the prefix broke, or this gateway has not seen the
        conversation before and has only the decoder's own count.
        """
        sent, exact = turn.prompt.chain.total_bytes, turn.prompt.exact_tokens
        if matched_bytes:
            new = sent - matched_bytes
            tokens = self.tokens(new) if exact is None else exact * new // sent
            return max(0, tokens - known.completion_tokens)
        whole = exact or self.tokens(turn.prompt_bytes)
        return whole if known.prompt_bytes else max(0, whole - known.context_tokens)


_SPEAKS = frozenset({"stop", "completed", "end_turn", "stop_sequence"})
_OUTCOMES = {
    RelayEnd.COMPLETE: "complete",
    RelayEnd.CLIENT_GONE: "client_gone",
    RelayEnd.BROKEN: "broken",
    RelayEnd.RESUMABLE: "broken",
    RelayEnd.NOT_STARTED: "failed",
    RelayEnd.HELD: "failed",
}


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """What a turn came to, as far as the directory is told."""

    generated: bool  # the engine generated something
    prompt_tokens: int = 0  # as the engine says; 0 when it does not
    completion_tokens: int = 0
    met: tuple[str, ...] = ()  # SLO targets of the answer to a user
    missed: tuple[str, ...] = ()


class TurnMetrics:
    """The metrics of turns and answers, and their SLO targets."""

    def __init__(self, classes: Iterable[SloClass]) -> None:
        for one in classes:
            for objective in one.targets.by_objective:
                metrics.from_zero(metrics.SLO, *(f"{one.name}/{objective}/{met}" for met in ("yes", "no")))

    def placed(self, policy: str, cause: str, transferred: bool) -> None:
        metrics.PLACEMENTS.labels(policy, cause).inc()
        if transferred:
            metrics.TRANSFERS.labels(cause).inc()
        if cause == "redisaggregated":
            metrics.REDISAGGREGATIONS.labels("transferred" if transferred else "local").inc()

    def ended(
        self, turn: Turn, known: Known, cause: str, outcome: RelayOutcome, seen: Observation
    ) -> TurnOutcome:
        whole = outcome.end is RelayEnd.COMPLETE and not seen.failed
        end = _outcome(outcome, seen)
        metrics.labelled(metrics.TURNS, end).inc()
        kind = turn.api.operation, turn.model
        error = "" if whole and seen.status == 200 else end
        metrics.labelled(metrics.GENAI_DURATION, *kind, error).observe(seen.last_at - turn.arrived_at)
        if seen.status != 200 or (seen.first_token_at is None and not whole):
            return TurnOutcome(generated=False)
        usage = seen.usage
        completion = usage.completion_tokens if usage else max(0, seen.events - 2)
        prompt = usage.prompt_tokens if usage else 0
        if known.waiting_since is None:
            known.waiting_since = turn.arrived_at
        metrics.OUTPUT_TOKENS.inc(completion)
        if prompt:
            metrics.PROMPT_TOKENS.observe(prompt)
        if cause == "bound" and usage and usage.cached_tokens is not None:
            had = known.context_tokens - known.completion_tokens
            metrics.RECOMPUTED_TOKENS.inc(max(0, had - usage.cached_tokens))
        tbt = None
        if seen.first_token_at is not None:
            tbt = tbt_s(seen.first_token_at, seen.last_at, seen.gaps)
            if seen.streamed:
                which = "first" if cause in ("first_turn", "rebound", "moved") else "later"
                ttft_s = seen.first_token_at - turn.arrived_at
                metrics.labelled(metrics.TTFT_SECONDS, which).observe(ttft_s)
                metrics.labelled(metrics.GENAI_TTFT, *kind).observe(ttft_s)
        if tbt is not None:
            metrics.TBT_SECONDS.observe(tbt)
            metrics.labelled(metrics.GENAI_TPOT, *kind).observe(tbt)
        met: list[str] = []
        missed: list[str] = []
        if whole and _speaks_to_the_user(seen):
            targets = turn.slo_class.targets.by_objective
            for objective, seconds in self._answered(turn.slo_class.name, known, seen, tbt):
                if (target := targets.get(objective)) is not None:
                    within = seconds <= target
                    metrics.SLO.labels(turn.slo_class.name, objective, "yes" if within else "no").inc()
                    if turn.slo_class.name == DEFAULT_CLASS:  # the dashboard's percentages are of its targets
                        (met if within else missed).append(objective)
        return TurnOutcome(True, prompt, completion, tuple(met), tuple(missed))

    def _answered(
        self, slo_class: str, known: Known, seen: Observation, tbt: float | None
    ) -> Iterator[tuple[str, float]]:
        """The objectives of the answer, each with what it took."""
        since, known.waiting_since = known.waiting_since, None
        assert since is not None
        if seen.first_content_at is not None:
            ttfet = ttfet_s(since, seen.first_content_at)
            metrics.TTFET_SECONDS.observe(ttfet)
            metrics.labelled(metrics.CLASS_TTFET_SECONDS, slo_class).observe(ttfet)
            yield "ttfet", ttfet
        e2e = seen.last_at - since
        metrics.E2E_SECONDS.observe(e2e)
        yield "e2e", e2e
        if tbt is not None:
            metrics.LAST_TURN_TBT_SECONDS.observe(tbt)
            yield "last_turn_tbt", tbt


def _outcome(outcome: RelayOutcome, seen: Observation) -> str:
    """The engine may pass on an error of its own: as a status, or inside a stream that ends as it should."""
    if outcome.end is RelayEnd.COMPLETE:
        if (outcome.status or 0) >= 400:
            return "failed"
        if seen.failed:
            return "broken"
    return _OUTCOMES[outcome.end]


def _speaks_to_the_user(seen: Observation) -> bool:
    """A forced tool call ends with `stop` too, and speaks to a tool."""
    return seen.finish_reason in _SPEAKS and not seen.called_tool
