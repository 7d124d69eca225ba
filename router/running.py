"""Relay of one turn: the legs it needs, run to whatever end, and what was seen of them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from placement.engines import EngineInfo
from router import legs
from router.answers import Answers
from router.binding import Route
from router.config import GatewayConfig, Handover
from router.continuation import Continuation, Losses
from router.directory.client import DirectoryClient
from router.http import RelayEnd, RelayOutcome, Responder, StreamObserver, UpstreamPool
from router.returns import Returns
from router.turn import TokenRatio, Turn


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
        self._ratio.learn(turn, answer.prompt_tokens)
        if answer.died:
            self._losses.note(turn.prompt.chain.end.digest, prefiller)
        lost = prefiller if answer.unreachable else None
        prefilled.at = self._clock() if answer.prompt_tokens else None
        prefilled.cached_tokens = answer.cached_tokens or 0
        self._directory.prefill_done(key, answer.prompt_tokens, lost, answer.cached_tokens)
        return answer.params
