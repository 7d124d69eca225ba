"""Handling of a turn from top to bottom: identify, bind, relay, report.

`binding.py` identifies the conversation and chooses the engines; `execution.py` runs the legs. This file
calls them in order, binds a turn again if its engine is lost, and reports a turn's end to the directory.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from placement.objectives import tbt_s
from router import metrics
from router.directory.api.client import DirectoryClient
from router.directory.api.messages import TurnEnded
from router.errors import ApiError, ClientLeft, DirectoryUnavailable
from router.gateway.config import GatewayConfig
from router.gateway.responses.stored_answers import Answers
from router.gateway.turn import legs
from router.gateway.turn.binding import Binder, Identified, Route
from router.gateway.turn.execution import PrefillLeg, RelayedTurn, TurnRunner
from router.gateway.turn.kv_reuse import count_move, record_prefix
from router.gateway.turn.prefetch import Prefetcher
from router.gateway.turn.quarantine import CrashQuarantine
from router.gateway.turn.resumption import StreamResumption
from router.gateway.turn.token_ratio import TokenRatio
from router.gateway.turn.turn import Turn
from router.gateway.turn.turn_metrics import TurnMetrics, TurnOutcome
from router.http import Observation, RelayEnd, Responder, UpstreamPool
from router.identity.conversation_ids import conversation_id

if TYPE_CHECKING:
    from router.gateway.tracing import TurnTracer

log = logging.getLogger("conserve.router.turn")


class TurnHandler:
    """Handles all turns of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        directory: DirectoryClient,
        pool: UpstreamPool,
        clock: Callable[[], float] = time.monotonic,
        tracer: "TurnTracer | None" = None,
        *,
        answers: Answers,
    ) -> None:
        self._directory, self._tracer, self._clock = directory, tracer, clock
        self._ratio = TokenRatio(config.tokens_per_byte)
        self._metrics = TurnMetrics(config.classes)
        self._quarantine, self._longest_ttl_s = CrashQuarantine(clock), config.longest_ttl_s
        self._background: set[asyncio.Task[None]] = set()
        self.prefetcher = Prefetcher(config.prefetch, directory, clock)
        self.binder = Binder(config, directory, self._ratio, self._metrics, clock)
        self._runner = TurnRunner(
            config, directory, pool, self._ratio, self._quarantine, self.prefetcher, answers, clock
        )

    async def serve(self, turn: Turn, responder: Responder) -> None:
        """Serve one turn to its end. Raises ApiError if the client gets an error instead of an answer."""
        if self._tracer is not None:
            attributes: dict[str, str | int] = {
                "conserve.api": turn.api.value,
                "conserve.body_bytes": sum(map(len, turn.raw)),
                "gen_ai.operation.name": turn.api.operation,
                "gen_ai.provider.name": "conserve",
                "gen_ai.request.model": turn.model,
            }
            turn = replace(turn, trace=self._tracer.begin(turn.headers, turn.arrived_at, attributes))
        hints = turn.prompt.hints.capped(self._longest_ttl_s)
        if hints is not turn.prompt.hints:
            turn = replace(turn, prompt=replace(turn.prompt, hints=hints))
        with turn.trace or nullcontext():
            await self._serve(turn, responder)

    async def _serve(self, turn: Turn, responder: Responder) -> None:
        found = await self.binder.identify(turn)
        turn.charge.reserve(self.binder.uncached_tokens(turn, found))
        if turn.trace is not None:
            turn.trace.identified(found.key, conversation_id(found.key), found.how)
        shown = conversation_id(found.key).encode()
        responder.add_header(b"x-conversation-id", shown)
        responder.add_header(b"x-session-token", shown)  # clients of llm-d send it back
        if turn.prompt.hints.ttl_s is not None:
            responder.add_header(b"x-conversation-ttl", b"%.10g" % turn.prompt.hints.ttl_s)
        digest = turn.prompt.chain.end.digest
        with self._directory.cache.turn(found.key, found.chain.end), metrics.STREAMS.track_inprogress():
            stream = StreamResumption(turn, self._clock)
            try:
                self._quarantine.check(digest)
                route = await self.binder.bind(turn, found, responder)
                relayed = await self._runner.run(turn, route, responder, stream)
                again = legs.decoder_lost(relayed.outcome) and not self._quarantine.holds(digest)
                if again and not responder.disconnected:
                    route = await self.binder.bind_again(turn, found, route, responder)
                    relayed = await self._runner.run(turn, route, responder, stream)
                first_cause = route.cause
                while relayed.outcome.end is RelayEnd.RESUMABLE:
                    route, relayed = await self._resume(turn, found, route, relayed, responder, stream)
            except ClientLeft:
                if not turn.charge.computing:
                    turn.charge.refund()
                metrics.TURNS.labels("client_gone").inc()
                return
            stream.count(relayed.outcome)
            self._close(turn, found, route, relayed, stream, first_cause)
            if legs.decoder_lost(relayed.outcome):
                self._quarantine.check(digest)
            legs.send_held_answer(relayed.outcome, responder)

    async def _resume(
        self,
        turn: Turn,
        found: Identified,
        route: Route,
        relayed: RelayedTurn,
        responder: Responder,
        stream: StreamResumption,
    ) -> tuple[Route, RelayedTurn]:
        """Continue a lost engine's stream on another engine, after the last token that the client has."""
        try:
            self._quarantine.check(turn.prompt.chain.end.digest)
            turn = stream.next_try(turn, relayed.outcome)
            route = await self.binder.bind_again(turn, found, route, responder)
            relayed = await self._runner.run(turn, route, responder, stream, relayed.observer)
            return route, replace(relayed, outcome=stream.judge(relayed.outcome))
        except ApiError as error:
            return route, replace(relayed, outcome=stream.break_off(responder, error))

    def _close(
        self,
        turn: Turn,
        found: Identified,
        route: Route,
        relayed: RelayedTurn,
        stream: StreamResumption,
        first_cause: str,
    ) -> None:
        """Report the end of a turn to the metrics, trace, charge, directory, prefetcher and log."""
        outcome, seen = relayed.outcome, stream.with_usage(relayed.observer.observation())
        broken = None
        if outcome.end is RelayEnd.COMPLETE and seen.status == 200:
            block = route.decoder.block_tokens
            broken = record_prefix(turn, found.matched_bytes, route.known, route.cause, block, seen)
        if route.moved:
            answered = outcome.end is RelayEnd.COMPLETE and seen.status == 200
            same_prefix = broken is None and found.matched_bytes > 0
            count_move(route, relayed.prefill, seen, answered=answered, same_prefix=same_prefix)
        done = self._metrics.ended(turn, route.known, first_cause, outcome, seen)
        cached = cached_tokens(relayed.prefill, seen)
        if turn.trace is not None:
            counts = done.prompt_tokens, cached, done.completion_tokens
            turn.trace.answered(*counts, seen.response_id, seen.finish_reason, broken)
        if done.generated:
            self._report_generated(turn, route, relayed.prefill, seen, done)
        else:
            if outcome.end is not RelayEnd.CLIENT_GONE:  # a turn whose client left may have been computed
                turn.charge.refund()
            self._directory.turn_ended(route.known, route.turn)
        if turn.prompt.hints.final and outcome.end is RelayEnd.COMPLETE:
            self._end_soon(found.key, "final")
        elif done.generated and (seen.called_tool or turn.prompt.hints.away_s is not None):
            self.prefetcher.tool_called(turn.prompt.hints.away_s, route.known)
        log.info(
            "turn conversation=%s request=%s how=%s engine=%s cause=%s outcome=%s "
            "prompt=%d cached=%d output=%d recomputed=%d broken_by=%s",
            *(found.key, seen.response_id or "-", found.how, route.decoder.engine, route.cause, outcome.end),
            *(done.prompt_tokens, cached, done.completion_tokens),
            *((broken[1], broken[0]) if broken is not None else (0, "-")),
        )

    def _report_generated(
        self, turn: Turn, route: Route, prefill: PrefillLeg, seen: Observation, done: TurnOutcome
    ) -> None:
        """Settle the charge of a turn that generated tokens, and notify the directory of its end."""
        prompt = done.prompt_tokens or self._ratio.prompt_tokens(turn, route.decoder.max_context)
        if done.prompt_tokens:
            self._ratio.learn(turn, done.prompt_tokens)
        computed = max(0, done.prompt_tokens - cached_tokens(prefill, seen))
        turn.charge.settle(computed if done.prompt_tokens else None, done.completion_tokens)
        first_token_s, handover_s = _durations(route, prefill, seen)
        if handover_s:
            metrics.HANDOVER_SECONDS.observe(handover_s)
        ended = TurnEnded(
            prompt,
            done.completion_tokens,
            tool_call=seen.called_tool,
            met=tuple(done.met),
            missed=tuple(done.missed),
            first_token_s=first_token_s,
            handover_s=handover_s,
            ttl_s=turn.prompt.hints.ttl_s or 0.0,
            cached=seen.usage.cached_tokens if seen.usage is not None else None,
        )
        self._directory.turn_ended(route.known, route.turn, ended)

    def _end_soon(self, key: str, cause: str) -> None:
        task = asyncio.create_task(self._end(key, cause))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _end(self, key: str, cause: str) -> None:
        try:
            await self._directory.end(key, cause)
        except DirectoryUnavailable as error:
            log.warning("conversation ends later, when idle conversation=%s reason=%r", key, str(error))


def cached_tokens(prefill: PrefillLeg, seen: Observation) -> int:
    """Return how many tokens of a turn's prompt were cached, so that neither leg computed them."""
    if prefill.done_at is not None:  # the decoder counts what the prefiller computed as cached
        return prefill.cached_tokens
    return (seen.usage and seen.usage.cached_tokens) or 0


def _durations(route: Route, prefill: PrefillLeg, seen: Observation) -> tuple[float, float]:
    """Return the seconds from placement to first token, and how many of them the handover took.

    The handover lasts from the end of the prefill to the first token, less the time of one token. A number is
    0 if it cannot be measured, for example because the answer is not a stream.
    """
    first = seen.first_token_at if seen.streamed else None
    if first is None or route.placed_at is None or first < route.placed_at:
        return 0.0, 0.0
    if prefill.done_at is None:
        return first - route.placed_at, 0.0
    step_s = tbt_s(first, seen.last_at, seen.gaps) or 0.0
    return first - route.placed_at, max(1e-6, first - prefill.done_at - step_s)
