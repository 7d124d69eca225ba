"""Resumption of streams: whether a stream can continue on another engine, and the request to that engine."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from router import metrics
from router.errors import ApiError, EngineLost
from router.gateway.turn.legs import decoder_lost
from router.gateway.turn.turn import Turn
from router.http import (
    Observation,
    RelayEnd,
    RelayOutcome,
    Responder,
    StreamProgress,
    TokenUsage,
)
from router.requests.body_parser import CHEAP_BYTES, Api

log = logging.getLogger("conserve.router.resumption")

MOST_TRIES = 2  # engines tried without a new token for the client
LONGEST_S = 120.0  # from the first loss to the last try
_SAMPLED = b": resumed on another engine; what follows was sampled there\n\n"
# An engine applies these fields to the tokens that it generates itself, not to those of the lost engine.
_COUNTED_OUTPUT = ("frequency_penalty", "presence_penalty", "bad_words", "thinking_token_budget")
# In a large body the value of these fields may be None: the client sent the field, but it was not parsed.
_LISTS = ("bad_words", "logprob_token_ids", "include", "thinking")
_PROBABILITIES = ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids")


def why_not_resumable(turn: Turn) -> str | None:
    """Return why this turn's stream cannot be resumed, as a metric label; None if it can."""
    body, large = turn.body, sum(map(len, turn.raw)) > CHEAP_BYTES
    unread = {name for name in _LISTS if large and body.get(name, 0) is None}
    if not turn.prompt.hints.resume:
        return "opted_out"
    if _number(body.get("n")) > 1 or _several_prompts(turn):
        return "several_answers"
    probabilities = [body.get(name) for name in _PROBABILITIES]
    listed = "logprobs" in str(body.get("include")) or unread & {"include", "logprob_token_ids"}
    if listed or any(one is not None and one is not False for one in probabilities):
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


class StreamResumption:
    """Progress of one turn's stream, and the tries to continue it on other engines.

    The next engine gets the client's request together with the tokens that were sent (`StreamProgress`). It
    feeds them to its parsers and continues after them, so that tool calls, structured output, stop strings
    and usage are right. Greedy answers continue as without the loss. The rest of a sampled answer is sampled
    anew, and a comment in the stream says so. A stream that cannot continue exactly ends in an error event,
    and is counted.
    """

    def __init__(self, turn: Turn, clock: Callable[[], float]) -> None:
        streams = turn.body.get("stream") is True
        self._why_not = why_not_resumable(turn) if streams else None
        self.progress = StreamProgress() if streams and self._why_not is None else None
        self._sampled = turn.body.get("temperature") != 0
        self._clock = clock
        self._tries = 0  # since the client last got a new piece
        self._pieces_before = 0  # pieces that the client had at the last try
        self._first_cut: float | None = None
        self._was_cut = False
        self._fails_as = "set_aside"  # metric label if the stream ends now

    def with_usage(self, seen: Observation) -> Observation:
        """Return `seen`; if the stream had no `usage`, with counts from its token lines (`resume.py`)."""
        prompt = self.progress.prompt_tokens if self.progress is not None and seen.usage is None else None
        if self.progress is None or prompt is None:
            return seen
        generated = self.progress.generated_tokens
        usage = TokenUsage(prompt[0], max(0, seen.events - 2) if generated is None else generated, prompt[1])
        return seen._replace(usage=usage)

    def next_try(self, turn: Turn, outcome: RelayOutcome) -> Turn:
        """Return the turn as the next engine gets it. Raises the error of `outcome` after too many tries."""
        assert self.progress is not None
        now, pieces, self._was_cut = self._clock(), self.progress.events, True
        if pieces > self._pieces_before or self._first_cut is None:
            self._tries, self._pieces_before, self._first_cut = 0, pieces, now
        self._fails_as = "cut_again"
        if self._tries >= MOST_TRIES or now - self._first_cut > LONGEST_S:
            raise outcome.error or EngineLost("The engine was lost in the middle of its answer; try again.")
        self._tries += 1
        self._fails_as = "no_place"
        self.progress.resume_comment = _SAMPLED if self._sampled and self.progress.events else b""
        outputs = self.progress.outputs
        return replace(turn, resume={"outputs": outputs} if outputs else None)

    def judge(self, outcome: RelayOutcome) -> RelayOutcome:
        """Return `outcome`, with RESUMABLE as its end if the engine was lost and another may be tried.

        Raises ApiError if the engine refused to continue the stream.
        """
        if outcome.end in (RelayEnd.NOT_STARTED, RelayEnd.HELD):
            if decoder_lost(outcome):
                return outcome._replace(end=RelayEnd.RESUMABLE)
            self._fails_as = "refused"
            status = outcome.response.status if outcome.response is not None else 0
            raise outcome.error or EngineLost(f"No other engine continues this answer (status {status}).")
        self._fails_as = "set_aside" if outcome.end is RelayEnd.RESUMABLE else "cut_again"
        return outcome

    def break_off(self, responder: Responder, error: ApiError) -> RelayOutcome:
        """End the client's stream with an error event."""
        responder.end_with_error(error)
        log.warning("stream not resumed why=%s reason=%r", self._fails_as, str(error))
        return RelayOutcome(RelayEnd.BROKEN, responder.status, error)

    def count(self, outcome: RelayOutcome) -> None:
        """Count a stream whose engine was lost, as resumed or by the reason why it was not."""
        if outcome.end is RelayEnd.BROKEN:
            obstacle = self._why_not or (self.progress.obstacle if self.progress is not None else None)
            first = obstacle if isinstance(outcome.error, EngineLost) else None
            if why := self._fails_as if self._was_cut else first:
                metrics.STREAMS_CUT.labels(why).inc()
        elif self._was_cut and outcome.end is RelayEnd.COMPLETE:
            metrics.STREAMS_CUT.labels("resumed").inc()
