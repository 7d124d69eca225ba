"""Provisioning: how many decoders the prefillers need, by section 4.1 of the conversation paper.

    (1) throughput   N * T_d >= R * L_d
    (2) memory       N * B   >= R * W

R is the rate of conversations, and N the number of decoders. R* = T_p / L_in is the rate that fills the
prefillers. N is the next whole number above the larger bound, so that the prefillers fill up first: their
load follows from the prompts that arrive.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import floor

from placement import PlacementError


class ProvisioningError(PlacementError, ValueError):
    """Error: the given means, rates or counts cannot be used to plan a fleet."""


class Bound(StrEnum):
    THROUGHPUT = "throughput"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Means:
    """Mean sizes of a conversation."""

    first_turn_tokens: float  # L_in
    decoder_tokens: float  # L_d: tokens that its decoder computes: outputs, and prompts of later turns
    resident_s: float  # W: time that its KV is on the accelerator: its lifetime, unless idle KV is parked
    peak_kv_tokens: float


TYPICAL = Means(15_000, 1_000, 15, 16_000)  # an agent's conversation, where no trace is given


@dataclass(frozen=True, slots=True)
class Capacity:
    """Throughput and KV of one engine of each kind."""

    prefill_tokens_per_s: float  # T_p
    decode_tokens_per_s: float  # T_d
    decoder_kv_tokens: float


@dataclass(frozen=True, slots=True)
class ResourceLoad:
    """Share of each resource in use; 1 is full."""

    prefill: float
    decode: float
    memory: float

    @property
    def saturates_first(self) -> str:
        shares = {"prefillers": self.prefill, "decoders": self.decode, "decoder memory": self.memory}
        return max(shares, key=shares.__getitem__)


@dataclass(frozen=True, slots=True)
class Provision:
    prefillers: int
    rate: float  # R: conversations per second that the fleet is planned for
    saturating_rate: float  # R*: the rate that fills the prefillers
    slots: float  # B: conversations at their peak that fit into a decoder's KV
    by_throughput: float  # decoders that bound (1) asks for
    by_memory: float  # decoders that bound (2) asks for
    decoders: int  # N
    load: ResourceLoad

    @property
    def bound(self) -> Bound:
        return Bound.MEMORY if self.by_memory > self.by_throughput else Bound.THROUGHPUT


def provision(means: Means, capacity: Capacity, prefillers: int = 1, rate: float | None = None) -> Provision:
    """Return how many decoders the prefillers need at `rate`, by default the rate that fills them."""
    values = (
        *(means.first_turn_tokens, means.decoder_tokens, means.resident_s, means.peak_kv_tokens),
        *(capacity.prefill_tokens_per_s, capacity.decode_tokens_per_s, capacity.decoder_kv_tokens),
    )
    if prefillers < 1 or any(not value > 0 for value in values) or (rate is not None and not rate > 0):
        raise ProvisioningError(f"means, rates and engine counts must be above zero: {means}, {capacity}")
    slots = capacity.decoder_kv_tokens / means.peak_kv_tokens
    if slots < 1:
        raise ProvisioningError(
            f"a conversation peaks at {means.peak_kv_tokens:.0f} tokens of KV and a decoder holds "
            f"{capacity.decoder_kv_tokens:.0f}: not one fits; take decoders with more memory"
        )
    saturating = prefillers * capacity.prefill_tokens_per_s / means.first_turn_tokens
    at = rate if rate is not None else saturating
    by_throughput = at * means.decoder_tokens / capacity.decode_tokens_per_s
    by_memory = at * means.resident_s / slots
    decoders = floor(max(by_throughput, by_memory)) + 1
    load = ResourceLoad(at / saturating, by_throughput / decoders, by_memory / decoders)
    return Provision(prefillers, at, saturating, slots, by_throughput, by_memory, decoders, load)


def prefillers_for(means: Means, capacity: Capacity, rate: float, load: float = 0.9) -> int:
    """Return how many prefillers carry `rate` conversations per second at a utilisation below `load`."""
    one = provision(means, capacity)
    return floor(rate / (one.saturating_rate * load)) + 1
