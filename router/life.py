"""The life of a conversation, turn by turn: identify, bind, relay, report.

A first turn is placed by the directory: its decoder computes the prompt, or a prefiller does while its KV
streams to the decoder, and the decoder answers. Every later turn goes to that decoder as it came. A later
turn that appends much, most of its prompt, may pass through a prefiller again
(`placement/fleet/policies.py`); a conversation whose decoder is lost is bound anew.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from placement.engines import EngineInfo
from placement.fleet.answers import Refusal
from placement.objectives import tbt_s
from router import chains, legs, metrics
from router.answers import AnswerObserver, Answers
from router.chains import Chain
from router.classes import ahead_s
from router.config import DEFAULT_CLASS, GatewayConfig, Handover, SloClass
from router.continuation import Continuation
from router.directory.cache import Known
from router.directory.client import DirectoryClient
from router.directory.messages import Ask, Placed
from router.errors import (
    ApiError,
    ClientLeft,
    DirectoryUnreachable,
    Unavailable,
)
from router.http import Observation, RelayEnd, RelayOutcome, Responder, StreamObserver, UpstreamPool
from router.identity import How, conversation_id, conversation_key, resolve_prefix
from router.losses import Losses
from router.prefixes import note_prefix
from router.reading import Api
from router.refusals import no_such_response, refused, unreachable
from router.returns import Returns
from router.turn import TokenRatio, Turn, TurnMetrics

if TYPE_CHECKING:
    from router.tracing import TurnTracer

log = logging.getLogger("conserve.router.life")


@dataclass(frozen=True, slots=True)
class Identified:
    """The conversation of a turn, and how it was found."""

    key: str
    how: How
    parent: str | None
    chain: Chain
    matched_bytes: int  # of the prompt, in an earlier request of this conversation
    turn: int  # the directory client's number of this turn


@dataclass(frozen=True, slots=True)
class Route:
    """The engines that serve a turn, and why these."""

    known: Known
    decoder: EngineInfo
    prefiller: EngineInfo | None  # None: the decoder computes what it does not have
    turn: int
    cause: str  # first_turn, rebound, redisaggregated, bound
    placed_at: float | None = None  # None: it needed no place

    @property
    def in_words(self) -> str:
        prefiller = f"; prefiller={self.prefiller.engine}" if self.prefiller is not None else ""
        return f"cause={self.cause}; decoder={self.decoder.engine}{prefiller}"


@dataclass(slots=True)
class Prefilled:
    """What became of a turn's prefill leg."""

    at: float | None = None  # when the prefiller had computed the prompt


@dataclass(frozen=True, slots=True)
class Ran:
    """A turn that was relayed, to whatever end."""

    outcome: RelayOutcome
    observer: StreamObserver
    prefilled: Prefilled


class Life:
    """The lives of all conversations at one gateway, as far as it serves their turns."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        clock: Callable[[], float] = time.monotonic,
        tracer: "TurnTracer | None" = None,
        answers: Answers | None = None,
    ) -> None:
        self._config, self._answers = config, answers
        self._tracer = tracer
        self._directory = directory
        self._pool = pool
        self._clock = clock
        self._ratio = TokenRatio(config.tokens_per_byte)
        self._metrics = TurnMetrics((SloClass(DEFAULT_CLASS, config.slo), *config.classes))
        self._placing: dict[str, asyncio.Task[tuple[Placed | Refusal, Known | None]]] = {}
        self._losses = Losses(clock)
        self._background: set[asyncio.Task[None]] = set()
        self.returns = Returns(config.returns, directory, pool, clock)

    async def serve(self, turn: Turn, responder: Responder) -> None:
        if self._tracer is not None:
            about: dict[str, str | int] = {
                "conserve.api": turn.api.value,
                "conserve.body_bytes": sum(map(len, turn.raw)),
                "gen_ai.operation.name": turn.api.operation,
                "gen_ai.provider.name": "conserve",
                "gen_ai.request.model": turn.model,
            }
            turn = replace(turn, trace=self._tracer.begin(turn.headers, turn.arrived_at, about))
        with turn.trace or nullcontext():
            await self._serve(turn, responder)

    async def _serve(self, turn: Turn, responder: Responder) -> None:
        who = await self._identify(turn)
        turn.charge.reserve(self._uncached(turn, who))
        if turn.trace is not None:
            turn.trace.identified(who.key, conversation_id(who.key), who.how)
        shown = conversation_id(who.key).encode()
        responder.add_header(b"x-conversation-id", shown)
        responder.add_header(b"x-session-token", shown)  # what clients of llm-d send back
        with self._directory.cache.turn(who.key, who.chain.end), metrics.STREAMS.track_inprogress():
            stream = Continuation(turn, self._clock)
            try:
                self._losses.check(turn.prompt.chain.end.digest)
                route = await self._bind(turn, who, responder)
                ran = await self._run(turn, route, responder, stream)
                lost = legs.decoder_lost(ran.outcome)
                again = lost and not self._losses.set_aside(turn.prompt.chain.end.digest)
                if again and not responder.disconnected:
                    route = await self._bind_again(turn, who, route, responder)
                    ran = await self._run(turn, route, responder, stream)
                cause = route.cause
                while ran.outcome.end is RelayEnd.CUT:
                    route, ran = await self._go_on(turn, who, route, ran, responder, stream)
            except ClientLeft:
                if not turn.charge.computing:
                    turn.charge.refund()
                metrics.TURNS.labels("client_gone").inc()
                return
            stream.ended(ran.outcome)
            self._close(turn, who, route, ran, cause)
            if legs.decoder_lost(ran.outcome):
                self._losses.check(turn.prompt.chain.end.digest)
            legs.answer_what_is_left(ran.outcome, responder)

    def _uncached(self, turn: Turn, who: Identified) -> int:
        """Tokens of the prompt that are to be computed, as far as anybody can tell now."""
        known = self._directory.bound(who.key)
        if known is not None:
            return self._ratio.uncached_tokens(turn, known, who.matched_bytes)
        return self.prompt_tokens(turn)

    def prompt_tokens(self, turn: Turn) -> int:
        return self._ratio.prompt_tokens(turn, self._directory.engines.max_context)

    # Identify

    async def _identify(self, turn: Turn) -> Identified:
        said, number = turn.prompt.identity, self._directory.next_turn()
        parent = conversation_key(turn.space, said.parent) if said.parent else None
        if said.id is not None:
            if said.previous_response:
                await self._check_response(turn, said.previous_response)
            key = conversation_key(turn.space, said.id)
            matched = self._directory.cache.nodes.find_of(turn.prompt.chain, key)
            who = Identified(key, How.EXPLICIT, parent, turn.prompt.chain, matched, number)
        else:
            chain = turn.prompt.chain
            if said.previous_response:
                chain = chains.of_pointer(turn.prompt.seed, said.previous_response, chain)
            found, running = await self._directory.find(chain)
            got = resolve_prefix(found, chain.end.digest, running, said.name)
            if got.how is How.NEW and said.previous_response:
                raise no_such_response()
            key = got.conversation or conversation_key(turn.space, said.new_id())
            matched = got.known_bytes if got.conversation else 0
            who = Identified(key, got.how, got.parent or parent, chain, matched, number)
        metrics.labelled(metrics.IDENTIFIED, who.how).inc()
        return who

    async def _check_response(self, turn: Turn, name: str) -> None:
        """An engine knows responses by their ids alone, whoever asks: the caller must have had it here."""
        found, _ = await self._directory.find(chains.of_pointer(turn.prompt.seed, name, turn.prompt.chain))
        if found is None:
            raise no_such_response()

    # Bind

    async def _bind(self, turn: Turn, who: Identified, responder: Responder) -> Route:
        known = self._directory.bound(who.key)
        if known is None or self._moves(turn, known):
            return await self._place(turn, who, responder)
        decoder = self._directory.engines.get(known.engine)
        assert decoder is not None
        uncached = self._ratio.uncached_tokens(turn, known, who.matched_bytes)
        if self._through_prefiller(turn, uncached):
            return await self._place(turn, who, responder, uncached=uncached)
        known.prompt_bytes = turn.prompt_bytes
        self._directory.turn_began(known, who.turn, who.chain.end)
        return Route(known, decoder, None, who.turn, "bound")

    def _moves(self, turn: Turn, known: Known) -> bool:
        """Off a decoder that is draining, unless only that one has what the client refers to."""
        return self._directory.leaving(known) and not turn.prompt.identity.previous_response

    def _through_prefiller(self, turn: Turn, uncached: int) -> bool:
        if turn.prompt.identity.previous_response:
            return False  # only the decoder has what the client refers to
        prompt = max(uncached, self._ratio.prompt_tokens(turn, 0))
        config = self._config
        return config.policy.later_turn_through_prefiller(config.redisaggregation, uncached, prompt)

    async def _bind_again(self, turn: Turn, who: Identified, route: Route, responder: Responder) -> Route:
        """The decoder did not answer, and nothing of an answer has reached the client."""
        metrics.FALLBACKS.labels("decoder_lost").inc()
        log.warning("decoder lost, placing again conversation=%s engine=%s", who.key, route.decoder.engine)
        return await self._place(turn, who, responder, lost=(route.decoder.engine, route.decoder.epoch))

    async def _place(
        self,
        turn: Turn,
        who: Identified,
        responder: Responder,
        *,
        uncached: int | None = None,
        lost: tuple[str, int] | None = None,
    ) -> Route:
        ask = Ask(
            key=who.key,
            gateway=self._directory.gateway,
            prompt_tokens=self.prompt_tokens(turn),
            wait_s=self._config.place_wait_s,
            parent=who.parent,
            uncached_tokens=uncached,
            lost=lost,
            end=who.chain.end,
            turn=who.turn,
            ahead_s=ahead_s(turn.slo_class, turn.prompt.hints),
            heads=self._ratio.heads(turn) if uncached is None else (),
            flow=turn.flow,
            waiting_share=turn.waiting_share,
        )
        asking = asyncio.create_task(self._ask(ask))

        def client_left() -> None:
            asking.cancel()

        forget = responder.on_disconnect(client_left)
        began = self._clock()
        try:
            outcome, known = await asking
        except DirectoryUnreachable as wrong:
            metrics.REFUSALS.labels("no_directory").inc()
            raise unreachable(wrong) from wrong
        except asyncio.CancelledError:
            self._directory.abandon(who.key, who.turn)
            if responder.disconnected:
                raise ClientLeft from None
            raise
        finally:
            forget()
            metrics.PLACE_SECONDS.observe(self._clock() - began)
        if isinstance(outcome, Refusal):
            metrics.REFUSALS.labels(outcome.reason).inc()
            metrics.TURNS.labels("refused").inc()
            raise refused(outcome)
        assert known is not None
        known.prompt_bytes = turn.prompt_bytes
        decoder = await self._directory.engine(outcome.engine, outcome.epoch)
        prefiller = self._directory.engines.get(outcome.prefiller) if outcome.prefiller else None
        if decoder is None:
            self._directory.turn_ended(known, who.turn, 0, 0)
            raise Unavailable(f"engine {outcome.engine} is gone; try again", retry_after_s=1.0)
        if outcome.prefiller and prefiller is None:  # gone in between: the decoder computes the prompt
            metrics.FALLBACKS.labels("prefill_failed").inc()
            self._directory.prefill_done(who.key)
        self._metrics.placed(self._config.policy, outcome.cause, prefiller is not None)
        return Route(known, decoder, prefiller, who.turn, outcome.cause, self._clock())

    async def _ask(self, ask: Ask) -> tuple[Placed | Refusal, Known | None]:
        """A fork goes where its parent is: while that is being placed here, it waits for it."""
        parent = self._placing.get(ask.parent or "")
        if parent is not None:
            await asyncio.wait([parent])
        placing = self._placing[ask.key] = asyncio.create_task(self._directory.place(ask))
        try:
            return await placing
        finally:
            placing.cancel()
            if self._placing.get(ask.key) is placing:
                del self._placing[ask.key]

    # Relay

    async def _go_on(
        self, turn: Turn, who: Identified, route: Route, ran: Ran, responder: Responder, stream: Continuation
    ) -> tuple[Route, Ran]:
        """The stream's engine ended under it: to another one, from where the client is."""
        try:
            self._losses.check(turn.prompt.chain.end.digest)
            turn = stream.next_try(turn, ran.outcome)
            route = await self._bind_again(turn, who, route, responder)
            ran = await self._run(turn, route, responder, stream, ran.observer)
            return route, replace(ran, outcome=stream.judged(ran.outcome))
        except ApiError as wrong:
            return route, replace(ran, outcome=stream.broken_off(responder, wrong))

    async def _run(
        self,
        turn: Turn,
        route: Route,
        responder: Responder,
        stream: Continuation,
        observer: StreamObserver | None = None,
    ) -> Ran:
        key, trace, prefilled = route.known.key, turn.trace, Prefilled()
        self.returns.came(route.known)
        turn.charge.computing = True
        if turn.prompt.hints.placement:  # of a turn that is placed again: one header each, in order
            responder.add_header(b"x-conversation-placement", route.in_words.encode())
        kind = StreamObserver if turn.kept is None else AnswerObserver
        observer = observer or kind(self._clock, lambda _: self._directory.first_token(key))
        if trace is not None:
            prefiller = route.prefiller.engine if route.prefiller is not None else None
            trace.bound(route.cause, route.decoder.engine, prefiller)
        try:
            if route.prefiller is None:
                sent = legs.for_leg("decode leg", turn, route.decoder)
                said = None, responder, observer, stream.sent
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
            # When it is taken back, the decode leg is there already: refused by the prefiller, it computes.
            with self._directory.prefilling(key, prefill.cancel):
                if self._config.handover is Handover.TOGETHER:
                    params: dict[str, Any] | None = legs.pull_from(prefiller, transfer_id)
                else:
                    await asyncio.wait([prefill])
                    params = None if prefill.cancelled() else prefill.result()
                sent = legs.for_leg("decode leg", turn, route.decoder)
                said = params, responder, observer, stream.sent
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
        self._ratio.learn(turn.prompt_bytes, answer.prompt_tokens)
        if answer.died:
            self._losses.note(turn.prompt.chain.end.digest, prefiller)
        lost = prefiller if answer.unreachable else None
        prefilled.at = self._clock() if answer.prompt_tokens else None
        self._directory.prefill_done(key, answer.prompt_tokens, lost, answer.cached_tokens)
        return answer.params

    # Report

    def _close(self, turn: Turn, who: Identified, route: Route, ran: Ran, first_cause: str) -> None:
        outcome, seen = ran.outcome, ran.observer.observation()
        if outcome.end is RelayEnd.COMPLETE and seen.status == 200:
            if self._answers is not None and turn.kept is not None:
                assert isinstance(ran.observer, AnswerObserver)
                self._answers.keep(turn.space, turn.kept, ran.observer.response)
            note_prefix(
                turn, who.matched_bytes, route.known, route.cause, route.decoder.block_tokens, seen
            )
        done = self._metrics.ended(turn, route.known, first_cause, outcome, seen)
        if turn.trace is not None:
            counts = done.prompt_tokens, done.completion_tokens
            turn.trace.answered(*counts, seen.response_id, seen.finish_reason)
        if not done.generated:
            if outcome.end is not RelayEnd.CLIENT_GONE:  # whose turn may have been computed
                turn.charge.refund()
            self._directory.turn_ended(route.known, route.turn, 0, 0)
        else:
            prompt = done.prompt_tokens or self._ratio.prompt_tokens(turn, route.decoder.max_context)
            if done.prompt_tokens and not turn.prompt.identity.previous_response:
                self._ratio.learn(turn.prompt_bytes, done.prompt_tokens)
            computed = max(0, done.prompt_tokens - ((seen.usage and seen.usage.cached_tokens) or 0))
            turn.charge.settle(computed if done.prompt_tokens else None, done.completion_tokens)
            by_id = seen.response_id if turn.api is Api.RESPONSES else None
            answer = chains.response_end(turn.prompt.seed, by_id) if by_id else None
            first_token_s, handover_s = _took(route, ran.prefilled, seen)
            self._directory.turn_ended(
                route.known,
                route.turn,
                prompt,
                done.completion_tokens,
                answer,
                tool_call=seen.called_tool,
                met=done.met,
                missed=done.missed,
                first_token_s=first_token_s,
                handover_s=handover_s,
                ttl_s=turn.prompt.hints.ttl_s or 0.0,
            )
        if turn.prompt.hints.final and outcome.end is RelayEnd.COMPLETE:
            self._end_soon(who.key, "final")
        elif done.generated and (seen.called_tool or turn.prompt.hints.away_s is not None):
            self.returns.left(turn, route.known)
        log.info(
            "turn conversation=%s request=%s how=%s engine=%s cause=%s outcome=%s prompt=%d output=%d",
            *(who.key, seen.response_id or "-", who.how, route.decoder.engine, route.cause, outcome.end),
            *(done.prompt_tokens, done.completion_tokens),
        )

    def _end_soon(self, key: str, cause: str) -> None:
        task = asyncio.create_task(self._end(key, cause))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self, key: str, cause: str) -> None:
        try:
            await self._directory.end(key, cause)
        except DirectoryUnreachable as wrong:
            log.warning("will end by its idle time, not now conversation=%s reason=%r", key, str(wrong))


def _took(route: Route, prefilled: Prefilled, seen: Observation) -> tuple[float, float]:
    """Seconds from the placement to the first token, and of those from the end of the prefill, less what one
    more token takes; 0 where nobody could see that."""
    first = seen.first_token_at if seen.streamed else None
    if first is None or route.placed_at is None or first < route.placed_at:
        return 0.0, 0.0
    if prefilled.at is None:
        return first - route.placed_at, 0.0
    step_s = tbt_s(first, seen.last_at, seen.gaps) or 0.0
    return first - route.placed_at, max(1e-6, first - prefilled.at - step_s)
