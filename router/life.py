"""The life of a conversation, turn by turn: identify, bind, relay, report.

A first turn is placed by the directory: a prefiller computes the prompt while its KV streams to the decoder,
and the decoder answers. Every later turn goes to that decoder as it came. A later turn that appends more than
`redisaggregate_tokens`, most of its prompt, passes through a prefiller again; a conversation whose decoder is
lost is bound anew.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from placement.admission import Refusal
from placement.engines import EngineInfo
from router import legs, metrics, sizes
from router.config import GatewayConfig, Handover
from router.directory.cache import Known
from router.directory.client import DirectoryClient, DirectoryUnreachable
from router.directory.waiting import Ask, Placed
from router.errors import NotFound, Unavailable
from router.http import RelayEnd, RelayOutcome, Responder, StreamObserver, UpstreamPool
from router.identity import chain as chains
from router.identity.chain import Chain
from router.identity.explicit import conversation_id, conversation_key
from router.identity.resolve import How, resolve
from router.measure import Measure
from router.refusals import answer_what_is_left, decoder_lost, refused, unreachable
from router.turn import Api, Turn

if TYPE_CHECKING:
    from router.tracing import Tracer

log = logging.getLogger("conserve.router.life")


@dataclass(frozen=True, slots=True)
class Who:
    key: str
    how: How
    parent: str | None
    chain: Chain
    matched_bytes: int  # of the prompt, in an earlier request of this conversation
    turn: int  # the directory client's number of this turn


@dataclass(frozen=True, slots=True)
class Plan:
    known: Known
    decoder: EngineInfo
    prefiller: EngineInfo | None  # None: the decoder computes what it does not have
    turn: int
    cause: str  # first_turn, rebound, redisaggregated, bound


class ClientLeft(Exception):
    """The client went away while its turn waited for a place."""


class Life:
    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        clock: Callable[[], float] = time.monotonic,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._config = config
        self._tracer = tracer
        self._directory = directory
        self._legs = legs.Legs(pool, config.engine_api_key)
        self._clock = clock
        self._ratio = sizes.TokenRatio(config.tokens_per_byte)
        self._measure = Measure(config.slo, clock)
        self._placing: dict[str, asyncio.Task[tuple[Placed | Refusal, Known | None]]] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def serve(self, turn: Turn, responder: Responder) -> None:
        if self._tracer is not None:
            turn = self._tracer.traced(turn)
        if turn.trace is None:
            await self._serve(turn, responder)
        else:
            with turn.trace:
                await self._serve(turn, responder)

    async def _serve(self, turn: Turn, responder: Responder) -> None:
        who = await self._identify(turn)
        if turn.trace is not None:
            turn.trace.identified(who.key, who.how)
        responder.add_header(b"x-conversation-id", conversation_id(who.key).encode())
        with self._directory.cache.turn(who.key, who.chain.end), self._measure.turn():
            try:
                plan = await self._bind(turn, who, responder)
                outcome, observer = await self._run(turn, plan, responder)
                if decoder_lost(outcome) and not responder.disconnected:
                    plan = await self._bind_again(turn, who, plan, responder)
                    outcome, observer = await self._run(turn, plan, responder)
            except ClientLeft:
                metrics.TURNS.labels("client_gone").inc()
                return
            self._close(turn, who, plan, outcome, observer)
            answer_what_is_left(outcome, responder)

    # Identify

    async def _identify(self, turn: Turn) -> Who:
        said, number = turn.identity, self._directory.next_turn()
        parent = conversation_key(turn.space, said.parent) if said.parent else None
        if said.id is not None:
            key = conversation_key(turn.space, said.id)
            matched = self._directory.cache.nodes.find_of(turn.chain, key)
            who = Who(key, How.EXPLICIT, parent, turn.chain, matched, number)
        else:
            chain = turn.chain
            if said.previous_response:
                chain = chains.of_pointer(turn.seed, said.previous_response, chain)
            found, running = await self._directory.find(chain)
            got = resolve(found, chain.end.digest, running)
            if got.how is How.NEW and said.previous_response:
                raise NotFound(
                    "no conversation has that response; it has ended, or never was: send its messages again",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            key = got.conversation or conversation_key(turn.space, f"c-{uuid4().hex}")
            matched = got.known_bytes if got.conversation else 0
            who = Who(key, got.how, got.parent or parent, chain, matched, number)
        metrics.labelled(metrics.IDENTIFIED, who.how).inc()
        return who

    # Bind

    async def _bind(self, turn: Turn, who: Who, responder: Responder) -> Plan:
        known = self._directory.bound(who.key)
        if known is None or self._moves(turn, known):
            return await self._place(turn, who, responder)
        decoder = self._directory.engines.get(known.engine)
        assert decoder is not None
        uncached = sizes.uncached_tokens(turn, known, who.matched_bytes, self._ratio)
        if self._through_prefiller(turn, uncached):
            return await self._place(turn, who, responder, uncached=uncached)
        known.prompt_bytes = turn.prompt_bytes
        self._directory.turn_began(known, who.turn, who.chain.end)
        return Plan(known, decoder, None, who.turn, "bound")

    def _moves(self, turn: Turn, known: Known) -> bool:
        """Off a decoder that is draining, unless only that one has what the client refers to."""
        return self._directory.leaving(known) and not turn.identity.previous_response

    def _through_prefiller(self, turn: Turn, uncached: int) -> bool:
        if turn.identity.previous_response:
            return False  # only the decoder has what the client refers to
        prompt = max(uncached, sizes.prompt_tokens(turn, self._ratio, 0))
        config = self._config
        return config.policy.later_turn_through_prefiller(config.redisaggregation, uncached, prompt)

    async def _bind_again(self, turn: Turn, who: Who, plan: Plan, responder: Responder) -> Plan:
        """The decoder did not answer, and nothing of an answer has reached the client."""
        metrics.FALLBACKS.labels("decoder_lost").inc()
        log.warning("decoder lost, placing again conversation=%s engine=%s", who.key, plan.decoder.engine)
        return await self._place(turn, who, responder, lost=(plan.decoder.engine, plan.decoder.epoch))

    async def _place(
        self,
        turn: Turn,
        who: Who,
        responder: Responder,
        *,
        uncached: int | None = None,
        lost: tuple[str, int] | None = None,
    ) -> Plan:
        context = max((info.max_context for info in self._directory.engines.infos()), default=0)
        ask = Ask(
            key=who.key,
            gateway=self._directory.gateway,
            prompt_tokens=sizes.prompt_tokens(turn, self._ratio, context),
            wait_s=self._config.place_wait_s,
            parent=who.parent,
            uncached_tokens=uncached,
            lost=lost,
            end=who.chain.end,
            turn=who.turn,
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
            self._directory.prefill_done(who.key, 0)
        self._measure.placed(self._config.policy, outcome.cause, prefiller is not None)
        return Plan(known, decoder, prefiller, who.turn, outcome.cause)

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

    async def _run(self, turn: Turn, plan: Plan, responder: Responder) -> tuple[RelayOutcome, StreamObserver]:
        key, trace = plan.known.key, turn.trace
        observer = StreamObserver(self._clock, lambda _: self._directory.first_token(key))
        if trace is not None:
            prefiller = plan.prefiller.engine if plan.prefiller is not None else None
            trace.bound(plan.cause, plan.decoder.engine, prefiller)
        try:
            if plan.prefiller is None:
                sent = turn if trace is None else trace.decoding(turn, plan.decoder.engine)
                outcome = await self._legs.decode(sent, key, plan.decoder, None, responder, observer)
            else:
                outcome = await self._run_both(turn, plan, plan.prefiller, responder, observer)
        except BaseException:
            self._directory.turn_ended(plan.known, plan.turn, 0, 0)  # or it would count as running for ever
            raise
        if trace is not None:
            trace.decoded(outcome.end, outcome.end is RelayEnd.COMPLETE, observer.first_token_at)
        return outcome, observer

    async def _run_both(
        self, turn: Turn, plan: Plan, prefiller: EngineInfo, responder: Responder, observer: StreamObserver
    ) -> RelayOutcome:
        key, transfer_id = plan.known.key, uuid4().hex
        prefill = asyncio.create_task(self._prefill(turn, key, prefiller, transfer_id))
        try:
            if self._config.handover is Handover.TOGETHER:
                params: dict[str, Any] | None = legs.pull_from(prefiller, transfer_id)
            else:
                params = await prefill
            sent = turn if turn.trace is None else turn.trace.decoding(turn, plan.decoder.engine)
            return await self._legs.decode(sent, key, plan.decoder, params, responder, observer)
        finally:
            if not prefill.done():
                self._directory.prefill_done(key, 0)
            prefill.cancel()

    async def _prefill(
        self, turn: Turn, key: str, prefiller: EngineInfo, transfer_id: str
    ) -> dict[str, Any] | None:
        sent = turn if turn.trace is None else turn.trace.prefilling(turn, prefiller.engine)
        answer = await self._legs.prefill(sent, key, prefiller, transfer_id)
        if turn.trace is not None:
            turn.trace.prefilled(answer.prompt_tokens)
        self._ratio.learn(turn.prompt_bytes, answer.prompt_tokens)
        lost = prefiller if answer.unreachable else None
        self._directory.prefill_done(key, answer.prompt_tokens, lost)
        return answer.params

    # Report

    def _close(
        self, turn: Turn, who: Who, plan: Plan, outcome: RelayOutcome, observer: StreamObserver
    ) -> None:
        seen = observer.observation()
        done = self._measure.ended(turn, plan.known, plan.cause, outcome, seen)
        if turn.trace is not None:
            turn.trace.answered(done.prompt_tokens, done.completion_tokens)
        if not done.spoke:
            self._directory.turn_ended(plan.known, plan.turn, 0, 0)
        else:
            prompt = done.prompt_tokens or sizes.prompt_tokens(turn, self._ratio, plan.decoder.max_context)
            if done.prompt_tokens and not turn.identity.previous_response:
                self._ratio.learn(turn.prompt_bytes, done.prompt_tokens)
            by_id = turn.api is Api.RESPONSES and seen.response_id
            answer = chains.response_end(turn.seed, seen.response_id) if by_id and seen.response_id else None
            self._directory.turn_ended(
                plan.known,
                plan.turn,
                prompt,
                done.completion_tokens,
                answer,
                tool_call=seen.called_tool,
                met=done.met,
                missed=done.missed,
            )
        if turn.final and outcome.end is RelayEnd.COMPLETE:
            self._end_soon(who.key, "final")
        log.info(
            "turn conversation=%s request=%s how=%s engine=%s cause=%s outcome=%s prompt=%d output=%d",
            *(who.key, seen.response_id or "-", who.how, plan.decoder.engine, plan.cause, outcome.end),
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
