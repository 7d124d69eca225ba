"""Capacity signals of the fleet, and advice about its size.

The load of the prefillers is the prefill time of the prompts that arrive in a second. The load of the
decoders is the share of their KV that is in use. Both are averaged over a window, so that one long prompt
raises no alarm.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, inf, isinf

from placement.engines import Role


@dataclass(frozen=True, slots=True)
class Signals:
    prefillers: int
    prefill_load: float  # seconds of prefill that arrive per second and prefiller; 1 is saturation
    prefill_wait_s: float  # wait in the shortest prefill queue now
    decoders: int
    decoder_pressure: float  # KV in use and not evictable, or refused, as a share of the decoders' KV limit
    running_share: float  # KV of conversations with a running turn now, as a share of that limit
    observed_s: float  # how long the fleet was observed; below the window, the averages say little
    prompts_s: float = 0.0  # seconds of prefill that arrive per second
    lent: float | None = None  # elastic: decoders' time that running turns leave to prompts, in engines
    kept: float = 0.0  # elastic: prefillers' time that turns of their own conversations take, in engines
    taking: int = 0  # elastic roles: prefillers that take conversations now; their KV counts as decoders'
    decoder_wait_s: float = 0.0  # elastic: how long a prompt waits on a decoder now, on average

    @property
    def prompt_load(self) -> float:
        """Return the time that arriving prompts need, as a share of the engines' time for prompts.

        1 is saturation. The time for prompts is the prefillers' time and, with elastic placement, what
        running turns leave on decoders.
        """
        if self.lent is None:
            return self.prefill_load
        engines = self.for_prompts
        return self.prompts_s / engines if engines else inf

    @property
    def for_prompts(self) -> float:
        """Return the time that running turns leave to prompts, in engines: 1.5 is one and a half engines."""
        return max(0.0, self.prefillers - self.kept) + (self.lent or 0.0)

    def saturates_in_s(self, longest_wait_s: float) -> float:
        """Return the seconds until the shortest queue reaches `longest_wait_s`, or infinity if never."""
        if self.prefill_wait_s >= longest_wait_s:
            return 0.0
        growth = self.prefill_load - 1.0
        return (longest_wait_s - self.prefill_wait_s) / growth if growth > 0 else inf


class CapacityWatch:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began: float | None = None
        self._demand = 0.0  # seconds of prefill that arrive per second
        self._demand_at = 0.0
        self._pressure: float | None = None
        self._pressure_at = 0.0

    def arrived(self, prefill_s: float, now: float) -> None:
        """Count a turn whose prompt takes `prefill_s` on a prefiller, placed or not."""
        self._begin(now)
        self._demand = self._demand * self._kept(now - self._demand_at) + prefill_s / self._window_s
        self._demand_at = now

    def observed(self, decoder_pressure: float, now: float) -> None:
        self._begin(now)
        keep = 0.0 if self._pressure is None else self._kept(now - self._pressure_at)
        self._pressure = keep * (self._pressure or 0.0) + (1 - keep) * decoder_pressure
        self._pressure_at = now

    def signals(
        self, prefillers: int, prefill_wait_s: float, decoders: int, running_share: float, now: float
    ) -> Signals:
        demand = self._demand * self._kept(now - self._demand_at)
        load = demand / prefillers if prefillers else (inf if demand > 1e-3 else 0.0)
        observed_s = 0.0 if self._began is None else now - self._began
        pressure = self._pressure or 0.0
        return Signals(
            prefillers, load, prefill_wait_s, decoders, pressure, running_share, observed_s, demand
        )

    def _begin(self, now: float) -> None:
        if self._began is None:
            self._began = now

    def _kept(self, elapsed: float) -> float:
        return exp(-max(0.0, elapsed) / self._window_s)


class Action(StrEnum):
    ADD_PREFILLERS = "add_prefillers"
    ADD_DECODERS = "add_decoders"
    NO_PREFILLERS = "no_prefillers"
    RAISE_HOST_KV = "raise_host_kv"
    LOWER_PREFILL_CAPS = "lower_prefill_caps"
    LOWER_DECODE_CAPS = "lower_decode_caps"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Loads at which advice is given, as shares of the capacity of a tier or role."""

    high: float = 0.85  # above this there are too few engines
    target: float = 0.7  # load that a change aims at
    low: float = 0.4  # below this there are more engines than needed

    def enough(self, load: float, engines: int) -> int:
        """Return how many engines at the target load could carry what `engines` carry at `load`."""
        if isinf(load):
            return engines + 1
        return max(1, ceil(round(load * engines / self.target, 6)))


@dataclass(frozen=True, slots=True)
class Recommendation:
    action: Action
    count: int  # engines to add or remove, 0 for other actions
    reason: str


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Load of the engines of a role, which `conserve advise` reports and the autoscaler follows."""

    load: float  # share of the engines' capacity in use
    engines: int  # engines that are up
    enough: int  # engines that could carry the load at the target load each

    def missing(self, limits: Thresholds) -> int:
        """Return how many engines the role lacks, or 0 if its load is not high."""
        return max(1, self.enough - self.engines) if self.load > limits.high else 0


def judge(role: Role, signals: Signals, limits: Thresholds, longest_wait_s: float) -> TierLoad:
    """Return the load of all engines of a role.

    The load of prefillers is the time that arriving prompts ask for, and the load of decoders is their KV in
    use. It is at least 1 if prompts wait for `longest_wait_s`: in the shortest prefill queue, or on a decoder
    on average.
    """
    prefills = role is Role.PREFILL
    engines = signals.prefillers if prefills else signals.decoders
    load = signals.prompt_load if prefills else signals.decoder_pressure
    if (signals.prefill_wait_s if prefills else signals.decoder_wait_s) >= longest_wait_s:
        load = max(load, 1.0)
    if prefills and signals.lent is not None:
        # The decoders' share of the work is subtracted first, because adding prefillers does not change it.
        others = signals.for_prompts - engines
        enough = max(1, ceil(round(signals.prompts_s / limits.target - others, 6)))
        return TierLoad(load, engines, enough)
    return TierLoad(load, engines, limits.enough(load, engines))


def advise(
    signals: Signals, thresholds: Thresholds, longest_wait_s: float, *, prefills: bool = True
) -> tuple[Recommendation, ...]:
    """Return the recommended changes of the fleet, empty if it fits its load.

    `prefills` says whether the fleet's policy uses prefillers at all.
    """
    found = _decoders(signals, thresholds, longest_wait_s)
    if not prefills:
        return found
    advise_prefillers = _prefillers if signals.lent is None else _elastic
    first = advise_prefillers(signals, thresholds, longest_wait_s)
    return (first, *found) if first else found


def _prefillers(signals: Signals, limits: Thresholds, longest_wait_s: float) -> Recommendation | None:
    load, engines = signals.prefill_load, signals.prefillers
    if not engines and load:
        return Recommendation(Action.ADD_PREFILLERS, 1, "prompts arrive and no prefiller is up")
    asks = f"prompts ask for {load:.0%} of the time of {_number(engines, 'prefiller')}"
    in_s = signals.saturates_in_s(longest_wait_s)
    if count := judge(Role.PREFILL, signals, limits, longest_wait_s).missing(limits):
        passing = f"their queues pass {longest_wait_s:.0f} s in {in_s:.0f} s"
        when = "" if isinf(in_s) else f"; at this rate {passing}"
        after = f"{engines + count} would be at {load * engines / (engines + count):.0%}"
        return Recommendation(Action.ADD_PREFILLERS, count, f"{asks}{when}; {after}")
    if load < limits.low and engines:
        reason = f"{asks}: they can be slower without a queue, or fewer"
        return Recommendation(Action.LOWER_PREFILL_CAPS, 0, reason)
    return None


def _elastic(signals: Signals, limits: Thresholds, longest_wait_s: float) -> Recommendation | None:
    """Advise on prefillers of a fleet whose decoders also compute prompts, in the time they have left."""
    asked, engines, lent = signals.prompts_s, signals.prefillers, signals.lent or 0.0
    load, available = signals.prompt_load, signals.for_prompts
    there = f"{_number(engines, 'prefiller')} and of what decoders have left, {lent:.1f} engines"
    if count := judge(Role.PREFILL, signals, limits, longest_wait_s).missing(limits):
        after = f"with {count} more {asked / (available + count):.0%}"
        return Recommendation(
            Action.ADD_PREFILLERS, count, f"prompts ask for {load:.0%} of the time of {there}; {after}"
        )
    if engines and asked < limits.low * lent:
        reason = f"decoders have {lent:.1f} engines' time left, of which prompts ask for {asked / lent:.0%}"
        return Recommendation(
            Action.NO_PREFILLERS, engines, f"{reason}: a fleet without prefillers would do as well"
        )
    if engines and load < limits.low:
        reason = f"prompts ask for {load:.0%} of the time of {there}: prefillers can be slower, or fewer"
        return Recommendation(Action.LOWER_PREFILL_CAPS, 0, reason)
    return None


def _decoders(signals: Signals, limits: Thresholds, longest_wait_s: float) -> tuple[Recommendation, ...]:
    """Advise on decoders by the same load as the autoscaler; name host memory if that is enough."""
    pressure, engines, running = signals.decoder_pressure, signals.decoders, signals.running_share
    if not engines:
        return (Recommendation(Action.ADD_DECODERS, 1, "no decoder is up"),)
    holds = f"conversations hold or ask for {pressure:.0%} of the KV of {_number(engines, 'decoder')}"
    if signals.taking:
        holds += f" and {_number(signals.taking, 'prefiller')} without work"
    if count := judge(Role.DECODE, signals, limits, longest_wait_s).missing(limits):
        if pressure <= limits.high:
            waits = f"prompts wait {signals.decoder_wait_s:.0f} s on decoders, too long for a first turn"
            return (Recommendation(Action.ADD_DECODERS, count, waits),)
        after = f"{engines + count} would be at {pressure * engines / (engines + count):.0%}"
        more = Recommendation(Action.ADD_DECODERS, count, f"{holds}; {after}")
        if not 0 < running <= limits.target:
            return (more,)
        instead = (
            f"or instead: conversations with a turn under way hold {running:.0%}; with more host memory "
            "(kv.host_kv_gib, overload.policy: park) the others could wait there"
        )
        return more, Recommendation(Action.RAISE_HOST_KV, 0, instead)
    if pressure < limits.low:
        reason = f"{holds}: they can be slower, or fewer"
        return (Recommendation(Action.LOWER_DECODE_CAPS, 0, reason),)
    return ()


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
