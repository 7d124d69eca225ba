"""Settings of the placer: the placing policy, where first turns are computed, and limits."""

from dataclasses import dataclass, field
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


class FirstTurns(StrEnum):
    PREFILLER = "prefiller"  # the paper's rule: always, when one is up
    ELASTIC = "elastic"


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    headroom_tokens: int = 1024  # reserved beyond the prompt, for the first answers
    fill: float = 0.9  # share of a decoder's KV that may be in use, what can give way not counted
    max_prefill_wait_s: float = 10.0
    retry_no_capacity_s: float = 5.0
    retry_no_engine_s: float = 10.0
    local_prefill_without_prefiller: bool = True
    shared_tier: bool = False  # decoders find KV of a conversation that another decoder had
    capacity_window_s: float = 60.0  # over which the two signals are averaged for `signals`
    forget_prefill_after_s: float = 5.0  # an idle prefiller's unreported ends
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)
    first_turns: FirstTurns = FirstTurns.ELASTIC  # and later ones with much to compute as well
    # Elastic: a decoder with capacity is chosen instead of the one with the least KV if its first token comes
    # in so much of the time.
    sooner_share: float = 0.9
    sooner_full: float = 0.25  # share of decoders without capacity, beyond which only the KV in use counts
    last_resort_fill: float = 0.75  # elastic: share of a prefiller's KV for what fits on no decoder
