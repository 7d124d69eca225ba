"""Overload signal: whether the decoders' KV is overloaded, judged by the observed demand alone.

The demand is the KV that is held and cannot be evicted, plus the KV that waiting and refused turns lack. Idle
KV with a copy on the host, and offline KV, can be evicted immediately and do not count. The demand is
averaged over a window and compared with two thresholds. Only an observation whose own demand exceeds the KV
declares an overload, and only after a whole window of observations: a single or a past peak does not.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import exp

DECLARED = 1.0  # demand, as a share of the KV, from which an overload is declared
OVER = 0.5  # demand, as a share of the KV, below which the overload is over: the paper's threshold
# If a smaller share of the KV is held, turns count as lacking KV only if the turns that fit on no decoder
# lack more than the waiting turns.
FULL = 0.7
WINDOW_S = 2.0  # over which the demand is averaged


@dataclass(frozen=True, slots=True)
class KvDemand:
    """KV that the decoders have, and KV that is demanded from them, in tokens."""

    capacity: float  # that conversations may use while all models are whole
    held: float  # held and not evictable: by running turns, and by idle conversations without another copy
    evictable: float  # held and evictable without delay
    waiting: float  # lacking for placed turns, which wait on an engine or are in transfer
    refused: float = 0.0  # lacking for turns that fit on no decoder

    @property
    def asked(self) -> float:
        return self.held + self.waiting + self.refused


class OverloadReason(StrEnum):
    FITS = "fits"
    EVICTABLE = "evictable"  # the demand fits once idle conversations and offline work are evicted
    BRIEF = "brief"  # demand exceeds the KV, but not on average, not for a window, or not now
    COMPUTE = "compute"  # turns wait although KV is free: compute is the bottleneck
    KV_SHORT = "kv_short"  # overload: turns lack KV, and the KV that is held cannot be evicted
    NOT_OVER = "not_over"  # overload still: the demand has fallen, but not below `OVER`
    NO_DECODER = "no_decoder"  # no decoder accepts conversations, so there is no KV to compare with


@dataclass(frozen=True, slots=True)
class OverloadState:
    overloaded: bool
    reason: OverloadReason
    asked: float  # averaged demand, as a share of the KV
    held: float  # averaged held KV, as a share of the KV
    since: float  # when `overloaded` last changed
    lacking_tokens: int  # by which the demand exceeds the KV now

    @property
    def declared(self) -> OverloadReason | None:
        """Return the reason for the overload, or None if there is no overload."""
        return self.reason if self.overloaded else None

    @classmethod
    def initial(cls) -> "OverloadState":
        return cls(False, OverloadReason.FITS, 0.0, 0.0, 0.0, 0)


class OverloadWatch:
    def __init__(self) -> None:
        self._began_at: float | None = None  # time of the first observation in the averages
        self._observed_at = 0.0
        self._averages = (0.0, 0.0, 0.0)  # shares: held, waiting, refused
        self.state = OverloadState.initial()

    def observe(self, demand: KvDemand, now: float) -> OverloadState:
        """Record the demand, and return the new state.

        The demand is compared with the KV that fits beside whole models, even while engines share layers.
        """
        before = self.state
        if demand.capacity <= 0:
            self._began_at = None
            asked = held = 0.0
            overloaded, reason = False, OverloadReason.NO_DECODER
        else:
            held, waiting, refused = self._averages = self._averaged(demand, now)
            asked = held + waiting + refused
            overloaded, reason = self._judge(demand, asked, held >= FULL or refused > waiting)
        self.state = OverloadState(
            overloaded,
            reason,
            asked,
            held,
            before.since if overloaded == before.overloaded else now,
            max(0, round(demand.asked - demand.capacity)),
        )
        return self.state

    def _averaged(self, demand: KvDemand, now: float) -> tuple[float, float, float]:
        if self._began_at is None:
            self._began_at = self._observed_at = now
            kept = 0.0
        else:
            kept = exp(-max(0.0, now - self._observed_at) / WINDOW_S)
        self._observed_at = now
        before, seen = self._averages, (demand.held, demand.waiting, demand.refused)
        held, waiting, refused = (
            kept * old + (1 - kept) * new / demand.capacity for old, new in zip(before, seen, strict=True)
        )
        return held, waiting, refused

    def _judge(self, demand: KvDemand, asked: float, for_kv: bool) -> tuple[bool, OverloadReason]:
        before = self.state.overloaded
        seen_s = self._observed_at - (self._began_at or 0.0)
        on_average = asked >= DECLARED
        at_once = demand.asked >= DECLARED * demand.capacity
        if on_average and for_kv and (before or (at_once and seen_s >= WINDOW_S)):
            return True, OverloadReason.KV_SHORT
        if before and asked >= OVER:
            return True, OverloadReason.NOT_OVER
        if on_average and not for_kv:
            return False, OverloadReason.COMPUTE
        if on_average or demand.asked > demand.capacity:
            return False, OverloadReason.BRIEF
        evicts = demand.asked + demand.evictable > demand.capacity
        return False, OverloadReason.EVICTABLE if evicts else OverloadReason.FITS
