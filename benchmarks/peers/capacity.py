"""Measures the capacity of plain vLLM behind a router, from conversations that all arrive at once."""

from dataclasses import dataclass

from traces import ReplayError
from traces.replay import Replay
from traces.replay.results import TurnResult

SHARE = 0.9  # share of the tokens that counts: at the end, too few conversations are left to fill engines


@dataclass(frozen=True)
class PeerCapacity:
    """Rates at which a router served a trace whose conversations all arrived at once."""

    trace: str
    router: str
    tokens_per_s: float  # new prompt tokens and output
    conversations_per_s: float


def capacity(trace: str, router: str, run: Replay) -> PeerCapacity:
    """Return the mean rates of a replay until the moment when `SHARE` of its tokens were served."""
    tokens, at = saturated(run)
    if not tokens:
        raise ReplayError(f"{router} served nothing of {trace}, so there is no capacity to compare with")
    whole = sum(_tokens(turn) for one in run.conversations for turn in one.turns)
    return PeerCapacity(trace, router, tokens / at, tokens / whole * len(run.conversations) / at)


def saturated(run: Replay) -> tuple[int, float]:
    """Return how many tokens make up `SHARE` of a replay, and when that many were served."""
    turns = sorted(
        (turn for conversation in run.conversations for turn in conversation.turns),
        key=lambda turn: turn.answered_s,
    )
    served, so_far = sum(map(_tokens, turns)), 0
    for turn in turns:
        so_far += _tokens(turn)
        if so_far >= SHARE * served:
            return so_far, turn.answered_s
    return 0, 0.0


def _tokens(turn: TurnResult) -> int:
    return turn.new_tokens + turn.output_tokens
