"""Placing policies by name: which engines hold conversations, and which turns a prefiller computes.

A later turn goes through the prefiller again when a prefix breaks, a file is pasted or a context is
compacted: real agents do that, and such a turn is a new first turn in all but name. The rule reads sizes that
are known when the turn arrives.
"""

from dataclasses import dataclass
from enum import StrEnum

from placement.engines import Role


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
