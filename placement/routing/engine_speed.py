"""Prefill-speed estimates of engines, from their own reports and from engines of the same hardware.

An engine that was slow while it started, or while another process had its machine, would get no prompts for
that, and without prompts it never shows that it is faster. So what an engine has shown counts less the longer
ago it was. For the rest, what engines of the same hardware show counts; where none of them has computed a
prompt lately, the best that this engine has shown. No engine is taken to be slower than it has shown.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import inf
from typing import NamedTuple

from placement.engines import EngineState
from placement.routing.prefill_queue import HALF_LIFE_S, TYPICAL_TOKENS
from placement.scheduling.prefill_curve import PrefillCurve

RECENT_S = 2 * HALF_LIFE_S  # an engine that computed a prompt within this time shows its hardware's speed
BEST_MOVES = 0.1  # share of the way that the best curve moves to the reported one, at each report
TYPICAL_EVERY_S = 1.0  # how often the typical curve of a hardware is computed


class EngineSpeed(NamedTuple):
    """Prefill-speed estimate of one engine at this moment."""

    reported: PrefillCurve | None  # None: the engine reports none
    estimate: PrefillCurve | None
    measured: bool  # by this engine or by engines like it; else the estimate is a guess
    tokens_per_s: float  # rate at which it got through waiting prompts; 0 where that is old
    freshness: float  # share of what it has shown that counts


@dataclass(slots=True)
class SpeedHistory:
    """Measured speeds of one engine."""

    hardware: str
    prompts: int | None = None  # count in its last report
    curve: PrefillCurve | None = None
    best: PrefillCurve | None = None  # best curve shown, moving towards the present one
    shown_at: float | None = None


class EngineSpeeds:
    """Prefill speeds of all engines."""

    def __init__(self, hardware_of: Mapping[str, str]) -> None:
        """Start without engines. `hardware_of` names each tier's hardware; tiers of one name are alike."""
        self._hardware_of = hardware_of
        self._engines: dict[str, SpeedHistory] = {}
        self._by_hardware: defaultdict[str, dict[str, SpeedHistory]] = defaultdict(dict)
        self._typical: dict[str, tuple[float, PrefillCurve | None]] = {}  # when computed, and the curve

    def add(self, engine: str, tier: str) -> None:
        hardware = self._hardware_of.get(tier, tier)
        self._engines[engine] = self._by_hardware[hardware][engine] = SpeedHistory(hardware)

    def remove(self, engine: str) -> None:
        if (history := self._engines.pop(engine, None)) is not None:
            del self._by_hardware[history.hardware][engine]

    def observe(self, state: EngineState, now: float) -> EngineSpeed:
        """Apply a report, and return the engine's speed."""
        engine, tokens_per_s = self._engines[state.engine], state.prompt_tokens_per_s
        engine.curve = PrefillCurve(*state.prefill_curve) if state.prefill_curve else None
        if engine.curve is None:
            return EngineSpeed(None, None, False, tokens_per_s, 1.0)
        if state.prompts and state.prompts != engine.prompts:
            # The first report does not say how old its figures are.
            engine.shown_at = now if engine.prompts is not None else now - RECENT_S
            moved = _between(engine.best or engine.curve, engine.curve, BEST_MOVES)
            engine.best = _faster(engine.curve, moved)
            if self._typical.get(engine.hardware, (0.0, None))[1] is None:
                self._typical.pop(engine.hardware, None)
        engine.prompts = state.prompts
        typical = self._typical_curve(engine.hardware, now)
        if engine.shown_at is None:
            measured = typical is not None
            return EngineSpeed(engine.curve, typical or engine.curve, measured, tokens_per_s, 1.0)
        freshness = 0.5 ** ((now - engine.shown_at) / HALF_LIFE_S)
        if engine.shown_at <= now - RECENT_S:
            tokens_per_s = 0.0  # the curve says better what the rate would be
        like = typical or engine.best or engine.curve
        estimate = _faster(engine.curve, _between(like, engine.curve, freshness))
        return EngineSpeed(engine.curve, estimate, True, tokens_per_s, freshness)

    def _typical_curve(self, hardware: str, now: float) -> PrefillCurve | None:
        """Return the median curve of engines that computed prompts recently, or None if there are none."""
        computed_at, typical = self._typical.get(hardware, (-inf, None))
        if now < computed_at + TYPICAL_EVERY_S:
            return typical
        recent = sorted(
            (
                one.curve
                for one in self._by_hardware[hardware].values()
                if one.curve is not None and one.shown_at is not None and one.shown_at > now - RECENT_S
            ),
            key=lambda curve: curve.seconds(TYPICAL_TOKENS),
        )
        typical = recent[(len(recent) - 1) // 2] if recent else None
        self._typical[hardware] = now, typical
        return typical


def _between(start: PrefillCurve, end: PrefillCurve, share: float) -> PrefillCurve:
    """Return the curve at the fraction `share` of the way from `start` to `end`."""
    pairs = zip(astuple(start), astuple(end), strict=True)
    return PrefillCurve(*(a + share * (b - a) for a, b in pairs))


def _faster(one: PrefillCurve, other: PrefillCurve) -> PrefillCurve:
    return one if one.seconds(TYPICAL_TOKENS) <= other.seconds(TYPICAL_TOKENS) else other
