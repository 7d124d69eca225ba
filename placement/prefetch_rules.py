"""When parked KV goes back to the accelerator, ahead of its conversation's next turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.engines import EngineState

PARK_AFTER_S = 60.0  # idle time after which KV is held on the host only, where nothing else is said
REMEMBERED_WAITS = 8


@dataclass(frozen=True, slots=True)
class RestoreAhead:
    """When parked KV goes back, and how long before its turn that is."""

    after_s: float  # from the end of the turn before
    due_in_s: float


@dataclass(frozen=True, slots=True)
class ReturnRules:
    """When parked KV goes back to the accelerator, ahead of its next turn."""

    park_after_s: float = PARK_AFTER_S  # shorter waits find their KV where it was
    lead_s: float = 2.0  # ahead of the return, and never more than half of the wait
    fewest_waits: int = 3  # of a conversation, before they say anything
    patience_s: float = 30.0  # for an engine that is busy

    def restore(self, announced_s: float | None, waits: Sequence[float]) -> "RestoreAhead | None":
        """None: not ahead. Of observed waits a quarter was shorter."""
        wait_s = announced_s
        if wait_s is None and len(waits) >= self.fewest_waits:
            quarter = sorted(waits)[len(waits) // 4]
            wait_s = quarter if quarter > self.park_after_s else None
        if wait_s is None:
            return None
        lead_s = min(self.lead_s, wait_s / 2)
        return RestoreAhead(wait_s - lead_s, lead_s)


def may_restore(state: EngineState, tokens: int) -> bool:
    """No turn there waits for its prompt or its KV, what comes back displaces nothing, and it can come: an
    engine that shares its layers brings nothing from its host."""
    waits = state.waiting or state.waiting_prompt_tokens
    return not (state.draining or waits or state.shares_layers) and state.free_tokens >= state.takes(tokens)
