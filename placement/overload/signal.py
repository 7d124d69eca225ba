"""Overload signal: whether the decoders' KV is overloaded, from observed demand alone.

Idle conversations whose KV is on the host as well, and offline work, are evictable at once and do not count.
The demand is what running and waiting turns ask for beyond that. It is averaged over a window and compared
with two thresholds. An overload is declared by an observation that itself finds more demand than KV, after at
least a window of observations: neither the first observation nor one that is past declares it.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import exp

DECLARED = 1.0  # demand, as a share of the KV, from which on it is an overload
OVER = 0.5  # demand below which it is over: the paper's threshold for restoring
FULL = 0.7  # share held, below which turns wait for KV only if more are refused than wait
WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class KvDemand:
    """KV that the decoders have, and KV that is demanded from them, in tokens."""

    capacity: float  # tokens of KV for conversations while all models are whole
    held: float  # not evictable: of running turns, and of idle ones that are nowhere else
    evictable: float  # held beside that, and released at once
    waiting: float  # missing for placed turns: they wait on an engine, or are in transfer to one
    refused: float = 0.0  # missing for turns that fit on no decoder

    @property
    def asked(self) -> float:
        return self.held + self.waiting + self.refused


class OverloadReason(StrEnum):
    FITS = "fits"
    EVICTABLE = "evictable"  # the demand fits once idle conversations and offline work are evicted
    BRIEF = "brief"  # demand exceeds the KV, but not on average, not for a window, or not now
    COMPUTE = "compute"  # turns wait beside free KV: compute is the bottleneck
    KV_SHORT = "kv_short"  # overload: turns wait and the KV is full of what is not evictable
    NOT_OVER = "not_over"  # overload still: demand is lower, but not yet low
    NO_DECODER = "no_decoder"  # no decoder accepts conversations, so there is no KV to compare with


@dataclass(frozen=True, slots=True)
class OverloadState:
    overloaded: bool
    reason: OverloadReason
    asked: float  # demand as a share of the KV, averaged
    held: float
    since: float  # when `overloaded` last changed
    lacking_tokens: int  # demand now beyond the KV

    @property
    def declared(self) -> OverloadReason | None:
        """Return the reason for the overload, or None if there is no overload."""
        return self.reason if self.overloaded else None

    @classmethod
    def initial(cls) -> "OverloadState":
        return cls(False, OverloadReason.FITS, 0.0, 0.0, 0.0, 0)


class OverloadWatch:
    def __init__(self) -> None:
        self._began_at: float | None = None  # first observation in the averages
        self._observed_at = 0.0
        self._averages = (0.0, 0.0, 0.0)  # shares: held, waiting, refused
        self.state = OverloadState.initial()

    def observe(self, demand: KvDemand, now: float) -> OverloadState:
        """Record the demand. It is compared with the KV of whole models even while layers are shared."""
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
