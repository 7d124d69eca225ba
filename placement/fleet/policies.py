"""Policies of a fleet: which engines hold conversations, which turns a prefiller computes, when KV returns.

A later turn goes through the prefiller again when a prefix breaks, a file is pasted or a context is
compacted: real agents do that, and such a turn is a new first turn in all but name. The rule reads sizes that
are known when the turn arrives.

A parked conversation's KV returns ahead of its next turn. An agent that called a tool comes back when the
tool has ended: at the time that it announced, else as its earlier waits say. Nothing is predicted about
answers. A restore waits until its engine has no turn that waits, for a bounded time: after that the turn
restores on arrival.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from placement.engines import EngineState, Role

PARK_AFTER_S = 60.0  # idle time after which KV is held on the host only, where nothing else is said
REMEMBERED_WAITS = 8


@dataclass(frozen=True, slots=True)
class Redisaggregation:
    """Rule for later turns: which go through a prefiller again.

    `uncached` is what the bound decoder would have to compute, `prompt` the turn's whole input. The prefiller
    computes what the decoder has cached as well, unless it still has it itself. `min_share` keeps a turn
    local when that would be mostly repeated work (docs/simulation.md has what it gains).
    """

    above_tokens: int = 4096
    min_share: float = 0.5

    def through_prefiller(self, uncached: int, prompt: int) -> bool:
        return uncached > self.above_tokens and uncached >= self.min_share * prompt


class PlacingPolicy(StrEnum):
    CONSERVE = "conserve"  # first turns, and large later ones
    COLLOCATED = "collocated"  # no turn: every engine serves whole conversations
    FULL_DISAGGREGATION = "full_disaggregation"  # every turn

    def prefills(self, role: Role) -> bool:
        return role is Role.PREFILL and self is not PlacingPolicy.COLLOCATED

    def holds_conversations(self, role: Role) -> bool:
        return role is not Role.PREFILL or self is PlacingPolicy.COLLOCATED

    @property
    def disaggregates(self) -> bool:
        return self is not PlacingPolicy.COLLOCATED

    def later_turn_waits(self, prefill_s: float, longest_s: float) -> float:
        """Seconds that a later turn queues for a prefiller at most: its decoder can compute it as well, so a
        queue longer than its own prefill is no help.
        """
        return min(prefill_s, longest_s) if self is PlacingPolicy.CONSERVE else longest_s

    def later_turn_through_prefiller(self, rule: Redisaggregation, uncached: int, prompt: int) -> bool:
        if self is PlacingPolicy.CONSERVE:
            return rule.through_prefiller(uncached, prompt)
        return self is PlacingPolicy.FULL_DISAGGREGATION


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
