"""Settings of the placer: which turns a prefiller computes, limits, and how long refused clients wait."""

from dataclasses import dataclass, field
from enum import StrEnum

from placement.engines import Role
from placement.scheduling.interface import DEFAULT_TARGETS


@dataclass(frozen=True, slots=True)
class Redisaggregation:
    """Rule for sending later turns through a prefiller again.

    A later turn has much to compute when a prefix breaks, a file is pasted or a context is compacted. Real
    agents do that, and such a turn is a first turn in all but name. The rule reads sizes that are known on
    arrival: `uncached` is what the bound decoder would have to compute, `prompt` is the turn's whole input.
    The prefiller also computes what the decoder has cached, unless it still has it itself. `min_share` keeps
    a turn local when that would be mostly repeated work (docs/simulation.md shows what it gains).
    """

    above_tokens: int = 4096
    min_share: float = 0.5

    def through_prefiller(self, uncached: int, prompt: int) -> bool:
        return uncached > self.above_tokens and uncached >= self.min_share * prompt


class PlacingPolicy(StrEnum):
    """Which turns are computed by a prefiller."""

    CONSERVE = "conserve"  # first turns, and large later ones
    COLLOCATED = "collocated"  # none: every engine serves whole conversations
    FULL_DISAGGREGATION = "full_disaggregation"  # all

    def prefills(self, role: Role) -> bool:
        return role is Role.PREFILL and self is not PlacingPolicy.COLLOCATED

    def holds_conversations(self, role: Role) -> bool:
        return role is not Role.PREFILL or self is PlacingPolicy.COLLOCATED

    @property
    def disaggregates(self) -> bool:
        return self is not PlacingPolicy.COLLOCATED

    def later_turn_waits(self, prefill_s: float, longest_s: float) -> float:
        """Return how long a later turn may wait for a prefiller, in seconds.

        Its decoder can compute it as well, so that a queue longer than its own prefill is no help.
        """
        return min(prefill_s, longest_s) if self is PlacingPolicy.CONSERVE else longest_s

    def later_turn_through_prefiller(self, rule: Redisaggregation, uncached: int, prompt: int) -> bool:
        if self is PlacingPolicy.CONSERVE:
            return rule.through_prefiller(uncached, prompt)
        return self is PlacingPolicy.FULL_DISAGGREGATION


class FirstTurns(StrEnum):
    """Where first turns, and later turns with long uncached prompts, are prefilled."""

    PREFILLER = "prefiller"  # the paper's rule: always on a prefiller when one is up
    ELASTIC = "elastic"  # where the first token comes first


class PrefillerRoles(StrEnum):
    """Whether prefillers take conversations of their own."""

    FIXED = "fixed"  # the paper's rule: only what fits on no decoder
    ELASTIC = "elastic"  # also new ones, while they idle and prompts wait on decoders


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    first_turns: FirstTurns = FirstTurns.ELASTIC
    roles: PrefillerRoles = PrefillerRoles.FIXED  # only with elastic first turns
    headroom_tokens: int = 1024  # reserved beyond the prompt, for the first answers
    fill: float = 0.9  # share of a decoder's KV that may be in use, evictable KV not counted
    max_prefill_wait_s: float = 10.0  # a longer queue refuses
    relieve_hot: bool = False  # conversations leave a decoder whose prompts wait much longer than another's
    shared_tier: bool = False  # decoders find KV of a conversation that another decoder had
    capacity_window_s: float = 60.0  # over which the capacity signals are averaged
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)
    ttft_s: float = DEFAULT_TARGETS.ttft_s
