"""Placing policies by name: which engines hold conversations, and which turns a prefiller computes."""

from enum import StrEnum

from placement.engines import Role
from placement.redisaggregation import Redisaggregation


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
