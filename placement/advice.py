"""What to change about a fleet, from its two observed signals: which action, how much of it, and why."""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil, isinf

from placement.capacity import Signals


class Action(StrEnum):
    ADD_PREFILLERS = "add_prefillers"
    ADD_DECODERS = "add_decoders"
    RAISE_HOST_KV = "raise_host_kv"
    LOWER_PREFILL_CAPS = "lower_prefill_caps"
    LOWER_DECODE_CAPS = "lower_decode_caps"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares of a tier's capacity."""

    high: float = 0.85  # above: too few engines
    target: float = 0.7  # what a change aims at
    low: float = 0.4  # below: more than is needed

    def enough(self, load: float, engines: int) -> int:
        """Engines with which what these carry would be at the target."""
        if isinf(load):
            return engines + 1
        return max(1, ceil(round(load * engines / self.target, 6)))


@dataclass(frozen=True, slots=True)
class Recommendation:
    action: Action
    count: int  # engines to add; 0 where the action has no number
    reason: str


def advise(
    signals: Signals, thresholds: Thresholds, longest_wait_s: float, *, prefills: bool = True
) -> tuple[Recommendation, ...]:
    """Nothing: the fleet fits its work. `prefills`: whether the fleet's policy uses prefillers at all."""
    found = [_decoders(signals, thresholds)]
    if prefills:
        found.insert(0, _prefillers(signals, thresholds, longest_wait_s))
    return tuple(recommendation for recommendation in found if recommendation is not None)


def _prefillers(signals: Signals, limits: Thresholds, longest_wait_s: float) -> Recommendation | None:
    load, engines = signals.prefill_load, signals.prefillers
    if not engines and load:
        return Recommendation(Action.ADD_PREFILLERS, 1, "prompts arrive and no prefiller is up")
    asks = f"prompts ask for {load:.0%} of the time of {_number(engines, 'prefiller')}"
    in_s = signals.saturates_in_s(longest_wait_s)
    if load > limits.high or in_s == 0:
        count = max(1, limits.enough(load, engines) - engines)
        passing = f"their queues pass {longest_wait_s:.0f} s in {in_s:.0f} s"
        when = "" if isinf(in_s) else f"; at this rate {passing}"
        after = f"{engines + count} would be at {load * engines / (engines + count):.0%}"
        return Recommendation(Action.ADD_PREFILLERS, count, f"{asks}{when}; {after}")
    if load < limits.low and engines:
        reason = f"{asks}: they can be slower without a queue, or fewer"
        return Recommendation(Action.LOWER_PREFILL_CAPS, 0, reason)
    return None


def _decoders(signals: Signals, limits: Thresholds) -> Recommendation | None:
    pressure, engines, running = signals.decoder_pressure, signals.decoders, signals.running_share
    if not engines:
        return Recommendation(Action.ADD_DECODERS, 1, "no decoder is up")
    holds = f"conversations hold {pressure:.0%} of the KV of {_number(engines, 'decoder')}"
    if pressure > limits.high:
        if 0 < running <= limits.target:
            reason = (
                f"{holds}, those with a turn under way {running:.0%}: with more host "
                "memory (kv.host_kv_gib) the others could wait there"
            )
            return Recommendation(Action.RAISE_HOST_KV, 0, reason)
        count = max(1, limits.enough(pressure, engines) - engines)
        after = f"{engines + count} would be at {pressure * engines / (engines + count):.0%}"
        return Recommendation(Action.ADD_DECODERS, count, f"{holds}; {after}")
    if pressure < limits.low:
        return Recommendation(Action.LOWER_DECODE_CAPS, 0, f"{holds}: they can be slower, or fewer")
    return None


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
