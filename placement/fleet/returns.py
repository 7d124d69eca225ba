"""Returns: when a parked conversation's KV goes back to the accelerator ahead of its next turn.

An agent that called a tool comes back when the tool has ended: at the time that it announced, else as its
earlier waits say. Nothing is predicted about answers. A restore waits until its engine has no turn that
waits, for a bounded time: after that the turn restores on arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.engines import EngineState

PARK_AFTER_S = 60.0  # idle time after which KV is held on the host only, where nothing else is said
REMEMBERED_WAITS = 8


@dataclass(frozen=True, slots=True)
class ReturnRules:
    park_after_s: float = PARK_AFTER_S  # shorter waits find their KV where it was
    lead_s: float = 2.0  # ahead of the return, and never more than half of the wait
    fewest_waits: int = 3  # of a conversation, before they say anything
    patience_s: float = 30.0  # for an engine that is busy

    def restore_after(self, announced_s: float | None, waits: Sequence[float]) -> float | None:
        """Seconds from the end of the turn; None: not ahead. Of observed waits a quarter was shorter."""
        wait_s = announced_s
        if wait_s is None and len(waits) >= self.fewest_waits:
            quarter = sorted(waits)[len(waits) // 4]
            wait_s = quarter if quarter > self.park_after_s else None
        return None if wait_s is None else wait_s - min(self.lead_s, wait_s / 2)


def may_restore(state: EngineState, tokens: int) -> bool:
    """No turn there waits for its prompt or its KV, what comes back displaces nothing, and it comes from the
    host: an engine that shares its layers would compute all of it again."""
    waits = state.waiting or state.waiting_prompt_tokens
    shares = state.split is not None and state.split.epoch > 0
    return not (state.draining or waits or shares) and state.free_tokens >= state.takes(tokens)
