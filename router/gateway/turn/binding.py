"""Binding of turns: finds a turn's conversation, and the engines that serve it.

The directory places a first turn: its decoder computes the prompt, or a prefiller does while its KV streams
to the decoder. Later turns go to that decoder unchanged. A later turn that appends most of its prompt may
pass through a prefiller again (`Redisaggregation`, placement/routing/placer_settings.py). A conversation
whose decoder is lost is bound again. If the directory refuses or cannot be reached, the client gets an error
with a status and a `Retry-After` (`refusal_error`, `unreachable_error`).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from placement.engines import EngineInfo
from placement.routing.receipts import Refusal, RefusalReason
from router import metrics
from router.directory.api.cache import Known
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import Ask, Placed
from router.errors import (
    ApiError,
    ClientLeft,
    ContextTooLong,
    DirectoryUnavailable,
    TooManyRequests,
    Unavailable,
)
from router.gateway.config import GatewayConfig
from router.gateway.slo_classes import PRIORITY_S
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Turn
from router.gateway.turn.turn_metrics import TurnMetrics
from router.http import Responder
from router.identity.conversation_ids import conversation_key
from router.identity.node_table import PrefixMatch, resolve_prefix
from router.identity.prefix_chain import Chain

log = logging.getLogger("conserve.router.binding")


@dataclass(frozen=True, slots=True)
class Identified:
    """The conversation of a turn, and how it was identified."""

    key: str
    how: PrefixMatch
    parent: str | None
    chain: Chain
    matched_bytes: int  # length of the prompt's beginning that an earlier request of the conversation had
    turn: int  # the directory client's number of this turn


@dataclass(frozen=True, slots=True)
class Route:
    """Engines that serve a turn, and why they were chosen."""

    known: Known
    decoder: EngineInfo
    prefiller: EngineInfo | None  # None: the decoder computes the prompt
    turn: int
    cause: str  # first_turn, rebound, moved, redisaggregated, bound
    placed_at: float | None = None  # None: the turn needed no placement
    moved: str = ""  # why this turn moves the conversation; empty: it does not

    @property
    def summary(self) -> str:
        """Return the value of the header `X-Conversation-Placement`."""
        prefiller = f"; prefiller={self.prefiller.engine}" if self.prefiller is not None else ""
        return f"cause={self.cause}; decoder={self.decoder.engine}{prefiller}"


class Binder:
    """Identifies conversations, and binds their turns to engines that the directory chooses."""

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
        """Return the conversation of a turn: by its id, or by the longest known prefix of its prompt."""
        identity, number = turn.prompt.identity, self._directory.next_turn()
        parent = conversation_key(turn.space, identity.parent) if identity.parent else None
        chain = turn.prompt.chain
        if identity.id is not None:
            key = conversation_key(turn.space, identity.id)
            matched = self._directory.cache.nodes.known_bytes(chain, key)
            found = Identified(key, PrefixMatch.EXPLICIT, parent, chain, matched, number)
        else:
            node, running = await self._directory.find(chain, identity.id_prefix)
            resolved = resolve_prefix(node, chain.end.digest, running, identity.id_prefix)
            key = resolved.conversation or conversation_key(turn.space, identity.new_id())
            matched = resolved.known_bytes if resolved.conversation else 0
            found = Identified(key, resolved.match, resolved.parent or parent, chain, matched, number)
        metrics.labelled(metrics.IDENTIFIED, found.how).inc()
        return found

    def uncached_tokens(self, turn: Turn, found: Identified) -> int:
        """Estimate how many tokens of the turn's prompt an engine has to compute."""
        known = self._directory.bound(found.key)
        if known is not None:
            return self._ratio.uncached_tokens(turn, known, found.matched_bytes)
        return self.prompt_tokens(turn)

    def prompt_tokens(self, turn: Turn) -> int:
        """Estimate the length of the turn's prompt in tokens, up to the engines' longest context."""
        return self._ratio.prompt_tokens(turn, self._directory.engines.max_context)

    async def bind(self, turn: Turn, found: Identified, responder: Responder) -> Route:
        """Return the route of a turn; the directory is asked only where engines have to be chosen.

        If the directory is unreachable, a bound turn stays on its decoder, even if most of its prompt is new.
        """
        known = self._directory.bound(found.key)
        if known is None or self._directory.leaving(known):  # moves off a draining decoder
            return await self._place(turn, found, responder)
        decoder = self._directory.engines.get(known.engine)
        assert decoder is not None
        uncached = self._ratio.uncached_tokens(turn, known, found.matched_bytes)
        if self._directory.connected and self._through_prefiller(turn, uncached):
            return await self._place(turn, found, responder, uncached=uncached)
        known.prompt_bytes = turn.prompt_bytes
        self._directory.turn_began(known, found.turn, found.chain.end)
        return Route(known, decoder, None, found.turn, "bound")

    def _through_prefiller(self, turn: Turn, uncached: int) -> bool:
        prompt = max(uncached, self._ratio.prompt_tokens(turn, 0))
        config = self._config
        return config.policy.later_turn_through_prefiller(config.redisaggregation, uncached, prompt)

    async def bind_again(self, turn: Turn, found: Identified, route: Route, responder: Responder) -> Route:
        """Return a new route for a turn whose decoder was lost, before its answer or in the middle of it."""
        metrics.FALLBACKS.labels("decoder_lost").inc()
        log.warning(
            "decoder lost, placing again conversation=%s engine=%s",
            found.key,
            route.decoder.engine,
        )
        return await self._place(turn, found, responder, lost=(route.decoder.engine, route.decoder.epoch))

    async def _place(
        self,
        turn: Turn,
        found: Identified,
        responder: Responder,
        *,
        uncached: int | None = None,
        lost: tuple[str, int] | None = None,
    ) -> Route:
        ask = Ask(
            key=found.key,
            gateway=self._directory.gateway,
            prompt_tokens=self.prompt_tokens(turn),
            wait_s=self._config.place_wait_s,
            parent=found.parent,
            uncached_tokens=uncached,
            lost=lost,
            end=found.chain.end,
            turn=found.turn,
            queue_weight=turn.slo_class.settings.queue_weight,
            priority_weight=turn.prompt.hints.priority * PRIORITY_S,
            prefixes=self._ratio.prefixes(turn) if uncached is None else (),
            flow=turn.flow,
            waiting_share=turn.waiting_share,
            answers=turn.prompt.answers,
        )
        asking = asyncio.create_task(self._ask(ask))

        def cancel() -> None:
            asking.cancel()

        unregister = responder.on_disconnect(cancel)
        began = self._clock()
        try:
            outcome, known = await asking
        except DirectoryUnavailable as error:
            metrics.REFUSALS.labels("no_directory").inc()
            raise unreachable_error(error) from error
        except asyncio.CancelledError:
            self._directory.abandon(found.key, found.turn)
            if responder.disconnected:
                raise ClientLeft from None
            raise
        finally:
            unregister()
            metrics.PLACE_SECONDS.observe(self._clock() - began)
        if isinstance(outcome, Refusal):
            metrics.REFUSALS.labels(outcome.reason).inc()
            metrics.TURNS.labels("refused").inc()
            raise refusal_error(outcome)
        assert known is not None
        known.prompt_bytes = turn.prompt_bytes
        decoder = await self._directory.engine(outcome.engine, outcome.epoch)
        prefiller = self._directory.engines.get(outcome.prefiller) if outcome.prefiller else None
        if decoder is None:
            self._directory.turn_ended(known, found.turn)
            raise Unavailable(f"engine {outcome.engine} is gone; try again", retry_after_s=1.0)
        if outcome.prefiller and prefiller is None:  # lost meanwhile: the decoder computes the prompt
            metrics.FALLBACKS.labels("prefill_failed").inc()
            self._directory.prefill_done(found.key)
        self._metrics.placed(self._config.policy, outcome.cause, prefiller is not None)
        moved = outcome.note["receipt"]["move"]["reason"] if outcome.cause == "moved" else ""
        return Route(known, decoder, prefiller, found.turn, outcome.cause, self._clock(), moved)

    async def _ask(self, ask: Ask) -> tuple[Placed | Refusal, Known | None]:
        """Ask the directory for a placement. If the parent conversation is being placed, wait for it."""
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


def refusal_error(refusal: Refusal) -> ApiError:
    """Return the error that a client gets when the directory refuses to place its turn."""
    retry = refusal.retry_after_s or None
    if refusal.reason is RefusalReason.TOO_LARGE:
        return ContextTooLong(refusal.message)
    if refusal.reason in (RefusalReason.NO_CAPACITY, RefusalReason.SATURATED):
        return TooManyRequests(refusal.message, code=refusal.reason, retry_after_s=retry)
    return Unavailable(refusal.message, code=refusal.reason, retry_after_s=retry)


def unreachable_error(error: DirectoryUnavailable) -> ApiError:
    """Return the error that a client gets while the directory cannot be reached."""
    return Unavailable(
        f"new conversations cannot be placed now: {error}; running ones continue, try again",
        code="no_directory",
        retry_after_s=error.retry_after_s,
    )
