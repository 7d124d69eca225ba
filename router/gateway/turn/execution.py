"""Execution of a turn on the engines of its route: one request, or a prefill leg and a decode leg."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from placement.engines import EngineInfo
from router.directory.api.client import DirectoryClient
from router.gateway.config import GatewayConfig, Handover
from router.gateway.responses.stored_answers import Answers
from router.gateway.turn import legs
from router.gateway.turn.binding import Route
from router.gateway.turn.prefetch import Prefetcher
from router.gateway.turn.quarantine import CrashQuarantine
from router.gateway.turn.resumption import StreamResumption
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Turn
from router.http import RelayEnd, RelayOutcome, Responder, StreamObserver, UpstreamPool


@dataclass(slots=True)
class PrefillLeg:
    """Result of a turn's prefill leg."""

    done_at: float | None = None  # when the prefiller had computed the prompt
    cached_tokens: int = 0  # prompt tokens that the prefiller had cached


@dataclass(frozen=True, slots=True)
class RelayedTurn:
    """A turn whose relay has ended, in success or failure."""

    outcome: RelayOutcome
    observer: StreamObserver
    prefill: PrefillLeg


class TurnRunner:
    """Runs turns on the engines that they are bound to."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        ratio: TokenRatio,
        quarantine: CrashQuarantine,
        prefetcher: Prefetcher,
        answers: Answers,
        clock: Callable[[], float],
    ) -> None:
        self._handover, self._directory, self._pool = config.handover, directory, pool
        self._ratio, self._quarantine, self._prefetcher = ratio, quarantine, prefetcher
        self._answers, self._clock = answers, clock

    async def run(
        self,
        turn: Turn,
        route: Route,
        responder: Responder,
        stream: StreamResumption,
        observer: StreamObserver | None = None,
    ) -> RelayedTurn:
        """Run a turn and relay its answer. A resumed stream keeps the `observer` of its first part."""
        key, trace, prefill = route.known.key, turn.trace, PrefillLeg()
        self._prefetcher.turn_arrived(route.known)
        turn.charge.computing = True
        if turn.prompt.hints.placement:  # a turn that is placed again has one header for each placement
            responder.add_header(b"x-conversation-placement", route.summary.encode())
        if observer is None:
            timing = self._clock, lambda _: self._directory.first_token(key)
            observer = self._answers.observer(turn.space, turn.history, *timing)
        if trace is not None:
            prefiller = route.prefiller.engine if route.prefiller is not None else None
            trace.bound(route.cause, route.decoder.engine, prefiller)
        try:
            if route.prefiller is None:
                outcome = await self._decode(turn, route, None, responder, observer, stream)
            else:
                outcome = await self._run_both(
                    turn, route, route.prefiller, responder, observer, prefill, stream
                )
        except BaseException:
            self._directory.turn_ended(route.known, route.turn)  # or it would count as running forever
            raise
        if legs.crashed_under_request(outcome):
            self._quarantine.record(turn.prompt.chain.end.digest, route.decoder)
        if trace is not None:
            trace.decoded(outcome.end, outcome.end is RelayEnd.COMPLETE, observer.first_token_at)
        return RelayedTurn(outcome, observer, prefill)

    async def _decode(
        self,
        turn: Turn,
        route: Route,
        params: dict[str, Any] | None,
        responder: Responder,
        observer: StreamObserver,
        stream: StreamResumption,
    ) -> RelayOutcome:
        sent = legs.for_leg("decode leg", turn, route.decoder)
        client = responder, observer, stream.progress
        return await legs.decode(self._pool, sent, route.known.key, route.decoder, params, *client)

    async def _run_both(
        self,
        turn: Turn,
        route: Route,
        prefiller: EngineInfo,
        responder: Responder,
        observer: StreamObserver,
        leg: PrefillLeg,
        stream: StreamResumption,
    ) -> RelayOutcome:
        key, transfer_id = route.known.key, uuid4().hex
        prefill = asyncio.create_task(
            self._prefill(turn, key, prefiller, transfer_id, leg, moves=bool(route.moved))
        )
        try:
            if self._handover is Handover.TOGETHER and not route.moved:
                params: dict[str, Any] | None = legs.pull_from(prefiller, transfer_id)
            else:
                await asyncio.wait([prefill])
                params = prefill.result()
            if route.moved and leg.done_at is not None:
                params = params or legs.pull_from(prefiller, transfer_id)  # some APIs answer without them
                params |= {"moves": True, "cached_tokens": route.known.context_tokens}
            return await self._decode(turn, route, params, responder, observer, stream)
        finally:
            if not prefill.done():
                self._directory.prefill_done(key)
            prefill.cancel()

    async def _prefill(
        self, turn: Turn, key: str, prefiller: EngineInfo, transfer_id: str, leg: PrefillLeg, *, moves: bool
    ) -> dict[str, Any] | None:
        sent = legs.for_leg("prefill leg", turn, prefiller)
        answer = await legs.prefill(self._pool, sent, key, prefiller, transfer_id, moves=moves)
        if turn.trace is not None:
            turn.trace.prefilled(answer.prompt_tokens)
        self._ratio.learn(turn, answer.prompt_tokens)
        if answer.died:
            self._quarantine.record(turn.prompt.chain.end.digest, prefiller)
        lost = prefiller if answer.unreachable else None
        leg.done_at = self._clock() if answer.prompt_tokens else None
        leg.cached_tokens = answer.cached_tokens or 0
        self._directory.prefill_done(key, answer.prompt_tokens, lost, answer.cached_tokens)
        return answer.params
