"""The life of a conversation, turn by turn: identify, bind, relay, report.

Who it is and where it runs is `binding.py`'s, the legs of a turn are `running.py`'s. Here is their order,
what happens when an engine is lost under a turn, and what its end tells everybody else.

Also whether its prefix was broken: a turn whose prompt does not go on with the tokens that its conversation's
KV is of. The chains of messages say what a client changed; what engines say was cached tells the rest: where
the messages are the same and the answer's KV is not found again, the same text has become other tokens. What
can be done about each cause is in docs/operate.md.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from placement.objectives import tbt_s
from router import metrics
from router.directory.cache import Asked, Known
from router.directory.client import DirectoryClient
from router.errors import ApiError, ClientLeft, DirectoryUnavailable
from router.gateway.config import DEFAULT_CLASS, GatewayConfig, SloClass
from router.gateway.responses.stored_answers import Answers
from router.gateway.turn import legs
from router.gateway.turn.binding import Binder, Identified, Route
from router.gateway.turn.execution import Continuation, Losses, Prefilled, Ran, Runner
from router.gateway.turn.prefetch import Returns
from router.gateway.turn.turn import TokenRatio, Turn, TurnMetrics
from router.http import Observation, RelayEnd, Responder, UpstreamPool
from router.identity.conversation_ids import conversation_id
from router.identity.prefix_chain import OTHERS, REASONED

if TYPE_CHECKING:
    from router.gateway.tracing import TurnTracer

log = logging.getLogger("conserve.router.life")


class Life:
    """The lives of all conversations at one gateway, as far as it serves their turns."""

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
        self._metrics = TurnMetrics((SloClass(DEFAULT_CLASS, config.slo), *config.classes))
        self._losses, self._longest_ttl_s = Losses(clock), config.longest_ttl_s
        self._background: set[asyncio.Task[None]] = set()
        self.returns = Returns(config.returns, directory, pool, clock)
        self.binder = Binder(config, directory, self._ratio, self._metrics, clock)
        self._runner = Runner(
            config, directory, pool, self._ratio, self._losses, self.returns, answers, clock
        )

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
        hints = turn.prompt.hints.within(self._longest_ttl_s)
        turn = replace(turn, prompt=replace(turn.prompt, hints=hints))
        with turn.trace or nullcontext():
            await self._serve(turn, responder)

    async def _serve(self, turn: Turn, responder: Responder) -> None:
        who = await self.binder.identify(turn)
        turn.charge.reserve(self.binder.uncached_tokens(turn, who))
        if turn.trace is not None:
            turn.trace.identified(who.key, conversation_id(who.key), who.how)
        shown = conversation_id(who.key).encode()
        responder.add_header(b"x-conversation-id", shown)
        responder.add_header(b"x-session-token", shown)  # what clients of llm-d send back
        if turn.prompt.hints.ttl_s is not None:
            responder.add_header(b"x-conversation-ttl", b"%.10g" % turn.prompt.hints.ttl_s)
        with self._directory.cache.turn(who.key, who.chain.end), metrics.STREAMS.track_inprogress():
            stream = Continuation(turn, self._clock)
            try:
                self._losses.check(turn.prompt.chain.end.digest)
                route = await self.binder.bind(turn, who, responder)
                ran = await self._runner.run(turn, route, responder, stream)
                lost = legs.decoder_lost(ran.outcome)
                again = lost and not self._losses.set_aside(turn.prompt.chain.end.digest)
                if again and not responder.disconnected:
                    route = await self.binder.bind_again(turn, who, route, responder)
                    ran = await self._runner.run(turn, route, responder, stream)
                cause = route.cause
                while ran.outcome.end is RelayEnd.RESUMABLE:
                    route, ran = await self._go_on(turn, who, route, ran, responder, stream)
            except ClientLeft:
                if not turn.charge.computing:
                    turn.charge.refund()
                metrics.TURNS.labels("client_gone").inc()
                return
            stream.ended(ran.outcome)
            self._close(turn, who, route, ran, stream, cause)
            if legs.decoder_lost(ran.outcome):
                self._losses.check(turn.prompt.chain.end.digest)
            legs.answer_what_is_left(ran.outcome, responder)

    async def _go_on(
        self, turn: Turn, who: Identified, route: Route, ran: Ran, responder: Responder, stream: Continuation
    ) -> tuple[Route, Ran]:
        """The stream's engine ended under it: to another one, from where the client is."""
        try:
            self._losses.check(turn.prompt.chain.end.digest)
            turn = stream.next_try(turn, ran.outcome)
            route = await self.binder.bind_again(turn, who, route, responder)
            ran = await self._runner.run(turn, route, responder, stream, ran.observer)
            return route, replace(ran, outcome=stream.judged(ran.outcome))
        except ApiError as wrong:
            return route, replace(ran, outcome=stream.broken_off(responder, wrong))

    def _close(
        self, turn: Turn, who: Identified, route: Route, ran: Ran, stream: Continuation, first_cause: str
    ) -> None:
        outcome, seen = ran.outcome, stream.with_usage(ran.observer.observation())
        if outcome.end is RelayEnd.COMPLETE and seen.status == 200:
            note_prefix(turn, who.matched_bytes, route.known, route.cause, route.decoder.block_tokens, seen)
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
            if done.prompt_tokens:
                self._ratio.learn(turn, done.prompt_tokens)
            had = (seen.usage and seen.usage.cached_tokens) or 0
            if ran.prefilled.at is not None:  # what came from the prefiller is cached for the decoder
                had = ran.prefilled.cached_tokens
            computed = max(0, done.prompt_tokens - had)
            turn.charge.settle(computed if done.prompt_tokens else None, done.completion_tokens)
            first_token_s, handover_s = _took(route, ran.prefilled, seen)
            if handover_s:
                metrics.HANDOVER_SECONDS.observe(handover_s)
            self._directory.turn_ended(
                route.known,
                route.turn,
                prompt,
                done.completion_tokens,
                tool_call=seen.called_tool,
                met=done.met,
                missed=done.missed,
                first_token_s=first_token_s,
                handover_s=handover_s,
                ttl_s=turn.prompt.hints.ttl_s or 0.0,
                cached=seen.usage.cached_tokens if seen.usage is not None else None,
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
        except DirectoryUnavailable as wrong:
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


_KEPT_CAUSES = frozenset({"bound", "redisaggregated"})  # of a route: the conversation is where its KV is


class BrokenBy(StrEnum):
    CHANGED_TOOLS = "changed_tools"
    EDITED_HISTORY = "edited_history"
    STRIPPED_REASONING = "stripped_reasoning"
    RERENDERED_TOOL_CALL = "rerendered_tool_call"
    RETOKENISED_OUTPUT = "retokenised_output"


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of a later turn, beside its prompt."""

    matched_bytes: int  # in an earlier request of this conversation
    had: int  # tokens that its decoder held
    generated: int  # of these, by the turn before
    cached: int | None  # that it found again, if it says so
    block: int  # tokens; less than one is never found


def broken_by(before: Asked, turn: Turn, seen: Reuse) -> tuple[BrokenBy, int] | None:
    """Why tokens were computed again, and how many; None where the prefix held, or nobody can know."""
    lost = seen.had if seen.cached is None else max(0, seen.had - seen.cached)
    if before.tools != turn.prompt.tools_digest:
        return BrokenBy.CHANGED_TOOLS, lost
    links = turn.prompt.chain.links
    answer = turn.prompt.marks[before.messages :].partition(bytes([OTHERS]))[0]  # what an assistant wrote
    goes_on = len(links) > before.messages and links[before.messages - 1] == before.end
    if not (goes_on and answer):
        if len(links) == before.messages and links[-1] == before.end:
            return None  # a retry
        if seen.cached is None:
            asked = seen.had - seen.generated
            lost -= int(asked * min(1.0, seen.matched_bytes / max(1, before.size)))
        return BrokenBy.EDITED_HISTORY, lost
    tokens = min(lost, seen.generated)
    if lost <= seen.block or (seen.cached is not None and lost > seen.generated + seen.block):
        return None  # all was found, or the prompt before was not either: its KV was not kept
    if before.reasoned and REASONED not in answer:
        return BrokenBy.STRIPPED_REASONING, tokens
    if seen.cached is None:
        return None
    return BrokenBy.RERENDERED_TOOL_CALL if before.called_tool else BrokenBy.RETOKENISED_OUTPUT, tokens


def note_prefix(
    turn: Turn, matched_bytes: int, known: Known, cause: str, block: int, seen: Observation
) -> None:
    """A turn has ended; before its counts are taken over."""
    before, usage = known.asked, seen.usage
    if before is not None and cause in _KEPT_CAUSES and known.context_tokens:
        cached = usage.cached_tokens if usage and cause == "bound" else None
        later = Reuse(matched_bytes, known.context_tokens, known.completion_tokens, cached, block)
        if (broken := broken_by(before, turn, later)) is not None:
            metrics.PREFIX_BROKEN_TOKENS.labels(broken[0]).inc(broken[1])
    known.asked = None
    if turn.prompt.marks:
        chain = turn.prompt.chain
        known.asked = Asked(
            chain.end.link,
            len(chain.links),
            chain.total_bytes,
            turn.prompt.tools_digest,
            seen.reasoned,
            seen.called_tool,
        )
