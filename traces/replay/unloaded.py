"""The unloaded latency, measured by the tool itself: a few conversations of the trace, played alone."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from traces.errors import ReplayError
from traces.format import Conversation
from traces.replay.results import ConversationResult, TurnResult, Unloaded

PROBE_TURNS = 4


def probes(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """Conversations from small to large first turns, their beginnings only, without waits."""
    by_size = sorted(conversations, key=lambda c: (c.turns[0].prompt_tokens, c.id))
    if not by_size or count < 1:
        return []
    picks = np.linspace(0.05, 0.95, count) if count > 1 else np.array([0.5])
    chosen = [by_size[round(float(pick) * (len(by_size) - 1))] for pick in picks]
    return [
        replace(
            conversation,
            id=f"probe-{number}-{conversation.id}",
            parent=None,
            turns=(
                replace(
                    conversation.turns[0],
                    appended_tokens=conversation.turns[0].prompt_tokens,
                    cached_tokens=0,
                ),
                *(replace(turn, wait_s=0.0) for turn in conversation.turns[1:PROBE_TURNS]),
            ),
        )
        for number, conversation in enumerate(chosen)
    ]


def fit(played: Sequence[ConversationResult]) -> Unloaded:
    """TTFT by relative errors: no probe is worth more for being slow. TBT by the time of whole answers: the
    gaps of an answer of few tokens say more about buffers than about the engine."""
    turns = [turn for conversation in played for turn in conversation.turns]
    spoken = [turn for turn in turns if turn.tbt_s]
    if not turns or not spoken:
        raise ReplayError(
            "no probe gave a timed answer of two tokens or more: no unloaded latency to compare with"
        )
    ttft = [turn.ttft_s for turn in turns]
    prefill, ttft_error = _nonnegative([_prefill_terms(turn) for turn in turns], ttft, ttft)
    decoding = [(turn.tbt_s or 0.0) * (turn.output_tokens - 1) for turn in spoken]
    decode, tbt_error = _nonnegative([_decode_terms(t) for t in spoken], decoding, [1.0] * len(spoken))
    fixed, per_token, per_product = prefill
    step, per_context = decode
    return Unloaded(fixed, per_token, per_product, step, per_context, len(played), ttft_error, tbt_error)


def _prefill_terms(turn: TurnResult) -> tuple[float, ...]:
    new, retained = turn.new_tokens, turn.prompt_tokens - turn.new_tokens
    return 1.0, float(new), new * (retained + new / 2.0)


def _decode_terms(turn: TurnResult) -> tuple[float, ...]:
    gaps = turn.output_tokens - 1
    return float(gaps), gaps * (turn.prompt_tokens + turn.output_tokens / 2.0)


def _nonnegative(
    terms: Sequence[tuple[float, ...]], seconds: Sequence[float], scales: Sequence[float]
) -> tuple[list[float], float]:
    """Non-negative least squares of errors in units of `scales`; and the mean error over the mean."""
    from scipy.optimize import nnls  # half a second to import, which only a replay with probes should pay

    unit = np.asarray(scales, dtype=float)
    rows = np.asarray(terms, dtype=float) / unit[:, None]
    wanted = np.asarray(seconds, dtype=float) / unit
    size = np.maximum(rows.max(axis=0), 1e-12)
    found, _ = nnls(rows / size, wanted)
    error = float(np.abs(rows @ (found / size) - wanted).mean() / wanted.mean())
    return [float(value) for value in found / size], error
