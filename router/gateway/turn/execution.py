"""Relay of one turn: the legs it needs, run to whatever end, and on another engine where a decoder ended.

Whether a stream may go on elsewhere, its request says (`why_not`); what the next engine is told is in
`Continuation`. A request under which engines ended twice is set aside (`Losses`).
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from placement.engines import EngineInfo
from router import metrics
from router.directory.client import DirectoryClient
from router.errors import ApiError, EngineLost, SetAside
from router.gateway.config import GatewayConfig, Handover
from router.gateway.responses.stored_answers import Answers
from router.gateway.turn import legs
from router.gateway.turn.binding import Route
from router.gateway.turn.legs import decoder_lost
from router.gateway.turn.prefetch import Returns
from router.gateway.turn.turn import TokenRatio, Turn
from router.http import (
    Observation,
    RelayEnd,
    RelayOutcome,
    Responder,
    StreamObserver,
    StreamProgress,
    TokenUsage,
    UpstreamPool,
)
from router.requests.parsing import CHEAP_BYTES, Api

log = logging.getLogger("conserve.router.running")

MOST_TRIES = 2  # engines that a stream may end under, after the first
LONGEST_S = 120.0  # from the first cut to the last try
_SAMPLED = b": resumed on another engine; what follows was sampled there\n\n"
# Of what an engine does with tokens that it takes for a prompt's, and not for its own.
_COUNTED_OUTPUT = ("frequency_penalty", "presence_penalty", "bad_words", "thinking_token_budget")
# None in the place of a large value: it is said, and not read.
_LISTS = ("bad_words", "logprob_token_ids", "include", "thinking")
_PROBABILITIES = ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids")


def why_not(turn: Turn) -> str | None:
    """Why a stream could not go on elsewhere, as far as its request says."""
    body, large = turn.body, sum(map(len, turn.raw)) > CHEAP_BYTES
    unread = {name for name in _LISTS if large and body.get(name, 0) is None}
    if not turn.prompt.hints.resume:
        return "opted_out"
    several = any(_number(body.get(name)) > 1 for name in ("n", "best_of"))
    if several or _several_prompts(turn):
        return "several_answers"
    said = [body.get(name) for name in _PROBABILITIES]
    listed = "logprobs" in str(body.get("include")) or unread & {"include", "logprob_token_ids"}
    if listed or any(one is not None and one is not False for one in said):
        return "logprobs"
    thinking = body.get("thinking")
    budget = isinstance(thinking, Mapping) and thinking.get("type") == "enabled"
    if budget or unread or any(body.get(name) for name in _COUNTED_OUTPUT):
        return "counted_output"
    return None


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def _several_prompts(turn: Turn) -> bool:
    prompt = turn.body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and turn.prompt.exact_tokens is None
    return several and turn.api is Api.COMPLETIONS


class Continuation:
    """Of one turn: what its client has of the stream, how often it was cut, and what the next engine is told.

    That one gets the client's request with the tokens that were sent, puts them through its parsers and goes
    on behind them, so that tool calls, structured output, stop strings and usage stand where they stood
    (`StreamProgress`). Greedy answers go on as they would have; sampled ones are drawn anew from there, which
    a comment in the stream says. What cannot go on exactly ends in an error event, and is counted.
    """

    def __init__(self, turn: Turn, clock: Callable[[], float]) -> None:
        streams = turn.body.get("stream") is True
        self._why_not = why_not(turn) if streams else None
        self.progress = StreamProgress() if streams and self._why_not is None else None
        self._sampled = turn.body.get("temperature") != 0
        self._clock = clock
        self._tries = 0  # since the client last got something new
        self._had = 0  # pieces, at the last try
        self._first_cut: float | None = None
        self._was_cut = False
        self._fails_as = "set_aside"  # what it is counted as if it ends now

    def with_usage(self, seen: Observation) -> Observation:
        """With what the engine said in its lines, where the client did not ask for `usage`."""
        prompt = self.progress.prompt_tokens if self.progress is not None and seen.usage is None else None
        if self.progress is None or prompt is None:
            return seen
        generated = self.progress.generated_tokens
        usage = TokenUsage(prompt[0], max(0, seen.events - 2) if generated is None else generated, prompt[1])
        return seen._replace(usage=usage)

    def next_try(self, turn: Turn, outcome: RelayOutcome) -> Turn:
        """What another engine is asked. Raises what ended the stream when it was cut too often."""
        assert self.progress is not None
        now, pieces, self._was_cut = self._clock(), self.progress.events, True
        if pieces > self._had or self._first_cut is None:
            self._tries, self._had, self._first_cut = 0, pieces, now
        self._fails_as = "cut_again"
        if self._tries >= MOST_TRIES or now - self._first_cut > LONGEST_S:
            raise outcome.error or EngineLost("The engine was lost in the middle of its answer; try again.")
        self._tries += 1
        self._fails_as = "no_place"
        self.progress.resume_comment = _SAMPLED if self._sampled and self.progress.events else b""
        outputs = self.progress.outputs
        return replace(turn, resume={"outputs": outputs} if outputs else None)

    def judged(self, outcome: RelayOutcome) -> RelayOutcome:
        """What became of a try: gone on, to be tried again, or an error."""
        if outcome.end in (RelayEnd.NOT_STARTED, RelayEnd.HELD):
            if decoder_lost(outcome):
                return outcome._replace(end=RelayEnd.RESUMABLE)
            self._fails_as = "refused"
            status = outcome.response.status if outcome.response is not None else 0
            raise outcome.error or EngineLost(f"No other engine goes on with this answer (status {status}).")
        self._fails_as = "set_aside" if outcome.end is RelayEnd.RESUMABLE else "cut_again"
        return outcome

    def broken_off(self, responder: Responder, error: ApiError) -> RelayOutcome:
        responder.end_with_error(error)
        log.warning("stream not resumed why=%s reason=%r", self._fails_as, str(error))
        return RelayOutcome(RelayEnd.BROKEN, responder.status, error)

    def ended(self, outcome: RelayOutcome) -> None:
        """Counts what came of a stream whose engine ended under it."""
        if outcome.end is RelayEnd.BROKEN:
            said = self._why_not or (self.progress.obstacle if self.progress is not None else None)
            first = said if isinstance(outcome.error, EngineLost) else None
            if why := self._fails_as if self._was_cut else first:
                metrics.STREAMS_CUT.labels(why).inc()
        elif self._was_cut and outcome.end is RelayEnd.COMPLETE:
            metrics.STREAMS_CUT.labels("resumed").inc()


MOST_LOSSES = 2
REMEMBERED_S = 300.0
_CAPACITY = 10_000


@dataclass(slots=True)
class _Loss:
    at: float
    engines: set[tuple[str, int]] = field(default_factory=set)


class Losses:
    """Engines lost under a request, by its prompt's digest, which holds key and model too.

    Whoever was there twice is tried no more, for a while. Without it one request that ends engines walks
    through the fleet: each is tried again elsewhere, here and by clients' libraries. A gateway cannot tell
    such a request from one that was beside it; both are set aside.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._losses: OrderedDict[bytes, _Loss] = OrderedDict()

    def note(self, digest: bytes, engine: EngineInfo) -> None:
        """Several requests with this prompt may have been running there: that is one engine lost."""
        now = self._clock()
        loss = self._losses.get(digest)
        if loss is None or now - loss.at > REMEMBERED_S:
            loss = self._losses[digest] = _Loss(now)
        loss.engines.add((engine.engine, engine.epoch))
        loss.at = now
        self._losses.move_to_end(digest)
        while len(self._losses) > _CAPACITY:
            self._losses.popitem(last=False)

    def set_aside(self, digest: bytes) -> bool:
        loss = self._losses.get(digest)
        if loss is None or self._clock() - loss.at > REMEMBERED_S:
            return False
        return len(loss.engines) >= MOST_LOSSES

    def check(self, digest: bytes) -> None:
        """Raises for a request that is not to be tried again."""
        if self.set_aside(digest):
            metrics.SET_ASIDE.inc()
            raise SetAside(
                f"{MOST_LOSSES} engines ended while they computed this request; it is set aside for"
                f" {REMEMBERED_S:.0f} s: change it, or tell the operator"
            )


@dataclass(slots=True)
class Prefilled:
    """What became of a turn's prefill leg."""

    at: float | None = None  # when the prefiller had computed the prompt
    cached_tokens: int = 0  # of the prompt, on the prefiller


@dataclass(frozen=True, slots=True)
class Ran:
    """A turn that was relayed, to whatever end."""

    outcome: RelayOutcome
    observer: StreamObserver
    prefilled: Prefilled


class Runner:
    """Runs turns on the engines that they are bound to."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        ratio: TokenRatio,
        losses: Losses,
        returns: Returns,
        answers: Answers,
        clock: Callable[[], float],
    ) -> None:
        self._answers = answers
        self._config, self._directory, self._pool = config, directory, pool
        self._ratio, self._losses, self._returns, self._clock = ratio, losses, returns, clock

    async def run(
        self,
        turn: Turn,
        route: Route,
        responder: Responder,
        stream: Continuation,
        observer: StreamObserver | None = None,
    ) -> Ran:
        key, trace, prefilled = route.known.key, turn.trace, Prefilled()
        self._returns.came(route.known)
        turn.charge.computing = True
        if turn.prompt.hints.placement:  # of a turn that is placed again: one header each, in order
            responder.add_header(b"x-conversation-placement", route.in_words.encode())
        seen = self._clock, lambda _: self._directory.first_token(key)
        observer = observer or self._answers.observer(turn.space, turn.history, *seen)
        if trace is not None:
            prefiller = route.prefiller.engine if route.prefiller is not None else None
            trace.bound(route.cause, route.decoder.engine, prefiller)
        try:
            if route.prefiller is None:
                sent = legs.for_leg("decode leg", turn, route.decoder)
                said = None, responder, observer, stream.progress
                outcome = await legs.decode(self._pool, sent, key, route.decoder, *said)
            else:
                outcome = await self._run_both(
                    turn, route, route.prefiller, responder, observer, prefilled, stream
                )
        except BaseException:
            self._directory.turn_ended(route.known, route.turn, 0, 0)  # or it would count as running for ever
            raise
        if legs.died_under_it(outcome):
            self._losses.note(turn.prompt.chain.end.digest, route.decoder)
        if trace is not None:
            trace.decoded(outcome.end, outcome.end is RelayEnd.COMPLETE, observer.first_token_at)
        return Ran(outcome, observer, prefilled)

    async def _run_both(
        self,
        turn: Turn,
        route: Route,
        prefiller: EngineInfo,
        responder: Responder,
        observer: StreamObserver,
        prefilled: Prefilled,
        stream: Continuation,
    ) -> RelayOutcome:
        key, transfer_id = route.known.key, uuid4().hex
        prefill = asyncio.create_task(self._prefill(turn, key, prefiller, transfer_id, prefilled))
        try:
            if self._config.handover is Handover.TOGETHER:
                params: dict[str, Any] | None = legs.pull_from(prefiller, transfer_id)
            else:
                await asyncio.wait([prefill])
                params = prefill.result()
            sent = legs.for_leg("decode leg", turn, route.decoder)
            said = params, responder, observer, stream.progress
            return await legs.decode(self._pool, sent, key, route.decoder, *said)
        finally:
            if not prefill.done():
                self._directory.prefill_done(key)
            prefill.cancel()

    async def _prefill(
        self, turn: Turn, key: str, prefiller: EngineInfo, transfer_id: str, prefilled: Prefilled
    ) -> dict[str, Any] | None:
        sent = legs.for_leg("prefill leg", turn, prefiller)
        answer = await legs.prefill(self._pool, sent, key, prefiller, transfer_id)
        if turn.trace is not None:
            turn.trace.prefilled(answer.prompt_tokens)
        self._ratio.learn(turn, answer.prompt_tokens)
        if answer.died:
            self._losses.note(turn.prompt.chain.end.digest, prefiller)
        lost = prefiller if answer.unreachable else None
        prefilled.at = self._clock() if answer.prompt_tokens else None
        prefilled.cached_tokens = answer.cached_tokens or 0
        self._directory.prefill_done(key, answer.prompt_tokens, lost, answer.cached_tokens)
        return answer.params
