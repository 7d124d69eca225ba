"""Bindings at one gateway: a turn's conversation, and the engines that serve it, or why none does.

A first turn is placed by the directory: its decoder computes the prompt, or a prefiller does while its KV
streams to the decoder. Every later turn goes to that decoder as it came. A later turn that appends much, most
of its prompt, may pass through a prefiller again (`Redisaggregation`, placement/routing/placer_settings.py).
A conversation whose decoder is lost is bound anew. What the directory refuses, or that it cannot be reached,
is an error for the client, with its status and when to try again (`refused`, `unreachable`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from placement.engines import EngineInfo
from placement.routing.receipts import Refusal, RefusalReason
from router import metrics
from router.directory.cache import Known
from router.directory.client import DirectoryClient
from router.directory.messages import Ask, Placed
from router.errors import (
    ApiError,
    ClientLeft,
    ContextTooLong,
    DirectoryUnavailable,
    TooManyRequests,
    Unavailable,
)
from router.gateway.config import GatewayConfig
from router.gateway.turn.turn import PRIORITY_S, TokenRatio, Turn, TurnMetrics
from router.http import Responder
from router.identity.conversation_ids import How, conversation_key, resolve_prefix
from router.identity.prefix_chain import Chain

log = logging.getLogger("conserve.router.binding")


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
    cause: str  # first_turn, rebound, moved, redisaggregated, bound
    placed_at: float | None = None  # None: it needed no place

    @property
    def in_words(self) -> str:
        prefiller = f"; prefiller={self.prefiller.engine}" if self.prefiller is not None else ""
        return f"cause={self.cause}; decoder={self.decoder.engine}{prefiller}"


class Binder:
    """Finds a turn's conversation and its engines; asks the directory where they have to be chosen."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        ratio: TokenRatio,
        turn_metrics: TurnMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._directory, self._ratio = config, directory, ratio
        self._metrics, self._clock = turn_metrics, clock
        self._placing: dict[str, asyncio.Task[tuple[Placed | Refusal, Known | None]]] = {}

    async def identify(self, turn: Turn) -> Identified:
        said, number = turn.prompt.identity, self._directory.next_turn()
        parent = conversation_key(turn.space, said.parent) if said.parent else None
        chain = turn.prompt.chain
        if said.id is not None:
            key = conversation_key(turn.space, said.id)
            matched = self._directory.cache.nodes.find_of(chain, key)
            who = Identified(key, How.EXPLICIT, parent, chain, matched, number)
        else:
            found, running = await self._directory.find(chain, said.name)
            got = resolve_prefix(found, chain.end.digest, running, said.name)
            key = got.conversation or conversation_key(turn.space, said.new_id())
            matched = got.known_bytes if got.conversation else 0
            who = Identified(key, got.how, got.parent or parent, chain, matched, number)
        metrics.labelled(metrics.IDENTIFIED, who.how).inc()
        return who

    def uncached_tokens(self, turn: Turn, who: Identified) -> int:
        """Tokens of the prompt that are to be computed, as far as anybody can tell now."""
        known = self._directory.bound(who.key)
        if known is not None:
            return self._ratio.uncached_tokens(turn, known, who.matched_bytes)
        return self.prompt_tokens(turn)

    def prompt_tokens(self, turn: Turn) -> int:
        return self._ratio.prompt_tokens(turn, self._directory.engines.max_context)

    async def bind(self, turn: Turn, who: Identified, responder: Responder) -> Route:
        known = self._directory.bound(who.key)
        if known is None or self._directory.leaving(known):  # off a decoder that is draining
            return await self._place(turn, who, responder)
        decoder = self._directory.engines.get(known.engine)
        assert decoder is not None
        uncached = self._ratio.uncached_tokens(turn, known, who.matched_bytes)
        if self._through_prefiller(turn, uncached):
            return await self._place(turn, who, responder, uncached=uncached)
        known.prompt_bytes = turn.prompt_bytes
        self._directory.turn_began(known, who.turn, who.chain.end)
        return Route(known, decoder, None, who.turn, "bound")

    def _through_prefiller(self, turn: Turn, uncached: int) -> bool:
        prompt = max(uncached, self._ratio.prompt_tokens(turn, 0))
        config = self._config
        return config.policy.later_turn_through_prefiller(config.redisaggregation, uncached, prompt)

    async def bind_again(self, turn: Turn, who: Identified, route: Route, responder: Responder) -> Route:
        """The decoder was lost, before anything of its answer reached the client or in the middle of it."""
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
            queue_weight=turn.slo_class.queue_weight,
            priority_weight=turn.prompt.hints.priority * PRIORITY_S,
            prefixes=self._ratio.prefixes(turn) if uncached is None else (),
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
        except DirectoryUnavailable as wrong:
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


def refused(refusal: Refusal) -> ApiError:
    retry = refusal.retry_after_s or None
    if refusal.reason is RefusalReason.TOO_LARGE:
        return ContextTooLong(refusal.message)
    if refusal.reason in (RefusalReason.NO_CAPACITY, RefusalReason.SATURATED):
        return TooManyRequests(refusal.message, code=refusal.reason, retry_after_s=retry)
    return Unavailable(refusal.message, code=refusal.reason, retry_after_s=retry)


def unreachable(wrong: DirectoryUnavailable) -> ApiError:
    return Unavailable(
        f"new conversations cannot be placed now: {wrong}; those that run go on, try again",
        code="no_directory",
        retry_after_s=wrong.retry_after_s,
    )
