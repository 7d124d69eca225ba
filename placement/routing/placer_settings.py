"""Settings of the placer: which turns a prefiller computes, where, and the limits on KV and queues."""

from dataclasses import dataclass, field
from enum import StrEnum

from placement.engines import Role
from placement.scheduling.interface import DEFAULT_TARGETS


@dataclass(frozen=True, slots=True)
class Redisaggregation:
    """Rule for sending later turns through a prefiller again.

    A later turn has much to compute when an agent changes its prefix, pastes a file or compacts its context.
    Such a turn is as long as a first turn. The rule reads two sizes that are known on arrival: `uncached` is
    how many tokens the bound decoder would have to compute, and `prompt` is the turn's whole input. The
    prefiller also has to compute the tokens that only the decoder has cached. `min_share` keeps a turn on its
    decoder where this would be most of the work (docs/simulation.md shows what it gains).
    """

    above_tokens: int = 4096
    min_share: float = 0.5

    def through_prefiller(self, uncached: int, prompt: int) -> bool:
        return uncached > self.above_tokens and uncached >= self.min_share * prompt


class PlacingPolicy(StrEnum):
    """Policy that decides which turns a prefiller computes."""

    CONSERVE = "conserve"  # first turns, and later turns with much to compute
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
        """Return how many seconds a later turn may wait for a prefiller that takes `prefill_s` for it.

        Its decoder can compute it as well, so waiting for longer than the prefill itself does not help.
        """
        return min(prefill_s, longest_s) if self is PlacingPolicy.CONSERVE else longest_s

    def later_turn_through_prefiller(self, rule: Redisaggregation, uncached: int, prompt: int) -> bool:
        if self is PlacingPolicy.CONSERVE:
            return rule.through_prefiller(uncached, prompt)
        return self is PlacingPolicy.FULL_DISAGGREGATION


class FirstTurns(StrEnum):
    """Rule for where first turns, and later turns with much to compute, are prefilled."""

    PREFILLER = "prefiller"  # the paper's rule: on a prefiller whenever a prefiller is up
    ELASTIC = "elastic"  # on the engine that gives the first token first


class PrefillerRoles(StrEnum):
    """Rule for which conversations prefillers take and hold themselves."""

    FIXED = "fixed"  # only conversations that fit on no decoder
    ELASTIC = "elastic"  # also new conversations, while the prefiller idles and prompts wait on decoders


@dataclass(frozen=True, slots=True)
class PlacerSettings:
    policy: PlacingPolicy = PlacingPolicy.CONSERVE
    first_turns: FirstTurns = FirstTurns.ELASTIC
    roles: PrefillerRoles = PrefillerRoles.FIXED  # only with elastic first turns
    headroom_tokens: int = 1024  # reserved beyond the prompt, for each answer
    fill: float = 0.9  # share of a decoder's KV that may be in use, evictable KV not counted
    max_prefill_wait_s: float = 10.0  # a first turn that would wait longer for its prefill is refused
    relieve_hot: bool = False  # conversations leave a decoder where prompts wait much longer than on another
    shared_tier: bool = False  # decoders find the KV that other decoders computed
    capacity_window_s: float = 60.0  # over which the capacity signals are averaged
    redisaggregation: Redisaggregation = field(default_factory=Redisaggregation)
    ttft_s: float = DEFAULT_TARGETS.ttft_s
