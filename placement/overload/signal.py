"""Overload of the decoders' KV, declared from observed signals alone.

Idle conversations whose KV is on the host as well, and offline work, give way at once and count for nothing:
what is left is asked for by running and waiting turns, after parking and offline work have given what they
have. Averaged over a window and with two thresholds, so that neither one prompt nor one end changes it.
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
    BRIEF = "brief"  # more is asked for than there is, but not on average
    COMPUTE = "compute"  # turns wait beside free KV: computing is the bottleneck
    KV_SHORT = "kv_short"  # overload: turns wait and the KV is full of what cannot give way
    NOT_OVER = "not_over"  # overload still: less is asked for, but not yet little


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
        self._observed_at: float | None = None
        self.state = OverloadState.initial()

    def observe(self, demand: KvDemand, now: float) -> OverloadState:
        """What is so now; `demand` is compared with the KV of whole models also while they are split."""
        if demand.capacity <= 0:
            return self.state
        before, settings = self.state, self._settings
        last = self._observed_at
        kept = 0.0 if last is None else exp(-max(0.0, now - last) / settings.window_s)
        self._observed_at = now
        asked = kept * before.asked + (1 - kept) * demand.asked / demand.capacity
        held = kept * before.held + (1 - kept) * demand.held / demand.capacity
        kv_waited_for = held >= settings.full or demand.refused > demand.waiting
        short = asked >= settings.declare and kv_waited_for
        overloaded = short or (before.overloaded and asked >= settings.over)
        self.state = OverloadState(
            overloaded,
            self._reason(demand, asked, short, overloaded),
            asked,
            held,
            before.since if overloaded == before.overloaded and last is not None else now,
            max(0, round(demand.asked - demand.capacity)),
        )
        return self.state

    def _reason(self, demand: KvDemand, asked: float, short: bool, overloaded: bool) -> OverloadReason:
        if overloaded:
            return OverloadReason.KV_SHORT if short else OverloadReason.NOT_OVER
        if asked >= self._settings.declare:
            return OverloadReason.COMPUTE
        if demand.asked > demand.capacity:
            return OverloadReason.BRIEF
        return (
            OverloadReason.YIELDS if demand.asked + demand.yields > demand.capacity else OverloadReason.FITS
        )
