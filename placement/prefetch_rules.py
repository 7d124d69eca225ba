"""Rules for prefetching parked KV to the accelerator ahead of its conversation's next turn.

An agent that called a tool comes back when the tool has ended. This time is either announced by the agent or
estimated from its earlier waits. A prefetch waits for a bounded time until no turn waits on its engine. If it
cannot run by then, the next turn restores its KV on arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.engines import EngineState

PARK_AFTER_S = 60.0  # default idle time after which KV is held on the host only
REMEMBERED_WAITS = 8  # waits of a conversation that are kept for the estimate


@dataclass(frozen=True, slots=True)
class PrefetchTime:
    """Time at which to prefetch a conversation's KV."""

    after_s: float  # from the end of the conversation's last turn to the prefetch
    due_in_s: float  # from the prefetch to the expected next turn


@dataclass(frozen=True, slots=True)
class PrefetchRules:
    park_after_s: float = PARK_AFTER_S  # after a shorter wait the KV is still on the accelerator
    lead_s: float = 2.0  # how long before the next turn, but at most half of the wait
    fewest_waits: int = 3  # observed waits of a conversation that an estimate needs
    patience_s: float = 30.0  # how long a prefetch waits for a busy engine

    def prefetch(self, announced_s: float | None, waits: Sequence[float]) -> "PrefetchTime | None":
        """Return when to prefetch after a turn, or None for never.

        `waits` are the conversation's earlier waits, which only count if `announced_s` is None.
        """
        wait_s = announced_s
        if wait_s is None and len(waits) >= self.fewest_waits:
            quartile = sorted(waits)[len(waits) // 4]
            wait_s = quartile if quartile > self.park_after_s else None
        if wait_s is None:
            return None
        lead_s = min(self.lead_s, wait_s / 2)
        return PrefetchTime(wait_s - lead_s, lead_s)


def may_prefetch(state: EngineState, tokens: int) -> bool:
    """Return whether the engine may prefetch a conversation of `tokens` now.

    No turn may wait there for its prompt or its KV, and the prefetched KV must fit without evicting any. An
    engine that shares its layers cannot restore KV from its host.
    """
    waits = state.waiting or state.waiting_prompt_tokens
    return not (state.draining or waits or state.shares_layers) and state.free_tokens >= state.takes(tokens)
