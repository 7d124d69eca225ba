"""Overload of the decoders' KV, declared from observed signals alone; and the orders to decoders then.

Idle conversations whose KV is on the host as well, and offline work, give way at once and count for nothing:
what is left is asked for by running and waiting turns, after parking and offline work have given what they
have. Averaged over a window and with two thresholds. It is declared by an observation that still finds more
asked for than there is, after a window of observations at the earliest: neither the first of them nor one
that is past declares it.

The orders say which groups share their layers from now on, and which have them again. Groups are made of
engines with whole models, more than two where two do not suffice, and stay as they are until they are
restored: to grow they would have to have whole models first, and what full ones hold does not fit there. What
a drop needs is in what engines report (`SplitState`); who merges says the plan.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import exp


@dataclass(frozen=True, slots=True)
class KvDemand:
    """Tokens of KV that decoders have and are asked for."""

    capacity: float  # that conversations may take, with whole models
    held: float  # cannot give way: of running turns, and of idle ones that are nowhere else
    yields: float  # held beside that, and given up at once
    waiting: float  # that turns lack which are placed: they wait on an engine, or are on their way to one
    refused: float = 0.0  # that turns lack which fit on no decoder

    @property
    def asked(self) -> float:
        return self.held + self.waiting + self.refused


class OverloadReason(StrEnum):
    FITS = "fits"
    YIELDS = "yields"  # it fits because idle conversations are parked and offline work gives way
    BRIEF = "brief"  # more is asked for than there is, but not on average, not for a window, or not now
    COMPUTE = "compute"  # turns wait beside free KV: computing is the bottleneck
    KV_SHORT = "kv_short"  # overload: turns wait and the KV is full of what cannot give way
    NOT_OVER = "not_over"  # overload still: less is asked for, but not yet little
    NO_DECODER = "no_decoder"  # none takes conversations: there is no KV to compare with


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    declare: float = 1.0  # share of the KV asked for, from which on it is overload
    over: float = 0.5  # share below which it is over: the paper's threshold of restoring
    full: float = 0.7  # share held, below which turns wait for KV only if more are refused than wait
    window_s: float = 2.0


@dataclass(frozen=True, slots=True)
class OverloadState:
    overloaded: bool
    reason: OverloadReason
    asked: float  # share of the KV, averaged
    held: float
    since: float  # when `overloaded` became what it is
    lacking_tokens: int  # asked for now, beyond what there is

    @property
    def declared(self) -> OverloadReason | None:
        """Why it is overload; None: it is not."""
        return self.reason if self.overloaded else None

    @classmethod
    def initial(cls) -> "OverloadState":
        return cls(False, OverloadReason.FITS, 0.0, 0.0, 0.0, 0)


class OverloadWatch:
    def __init__(self, settings: OverloadSettings | None = None) -> None:
        self._settings = settings or OverloadSettings()
        self._began_at: float | None = None  # the first observation that the averages are of
        self._observed_at = 0.0
        self._averages = (0.0, 0.0, 0.0)  # shares: held, waiting, refused
        self.state = OverloadState.initial()

    def observe(self, demand: KvDemand, now: float) -> OverloadState:
        """What is so now; `demand` is compared with the KV of whole models also while they are split."""
        before = self.state
        if demand.capacity <= 0:
            self._began_at = None
            asked = held = 0.0
            overloaded, reason = False, OverloadReason.NO_DECODER
        else:
            held, waiting, refused = self._averages = self._averaged(demand, now)
            asked = held + waiting + refused
            overloaded, reason = self._judge(demand, asked, held >= self._settings.full or refused > waiting)
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
            kept = exp(-max(0.0, now - self._observed_at) / self._settings.window_s)
        self._observed_at = now
        before, seen = self._averages, (demand.held, demand.waiting, demand.refused)
        held, waiting, refused = (
            kept * old + (1 - kept) * new / demand.capacity for old, new in zip(before, seen, strict=True)
        )
        return held, waiting, refused

    def _judge(self, demand: KvDemand, asked: float, for_kv: bool) -> tuple[bool, OverloadReason]:
        settings, before = self._settings, self.state.overloaded
        seen_s = self._observed_at - (self._began_at or 0.0)
        on_average = asked >= settings.declare
        at_once = demand.asked >= settings.declare * demand.capacity
        if on_average and for_kv and (before or (at_once and seen_s >= settings.window_s)):
            return True, OverloadReason.KV_SHORT
        if before and asked >= settings.over:
            return True, OverloadReason.NOT_OVER
        if on_average and not for_kv:
            return False, OverloadReason.COMPUTE
        if on_average or demand.asked > demand.capacity:
            return False, OverloadReason.BRIEF
        yields = demand.asked + demand.yields > demand.capacity
        return False, OverloadReason.YIELDS if yields else OverloadReason.FITS
