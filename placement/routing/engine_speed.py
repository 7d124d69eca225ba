"""Prefill-speed estimates of engines, from their own reports and from engines of the same hardware.

An engine that was slow while it started, or while another process used its machine, would get no prompts, and
without prompts it could not show that it is faster now. So an engine's measured speed loses weight with time.
The rest of the weight goes to the typical speed of engines of the same hardware or, if none of them computed
a prompt lately, to this engine's own best speed. The estimate is never slower than the engine's measured
speed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from math import inf
from typing import NamedTuple

from placement.engines import EngineState
from placement.routing.prefill_queue import HALF_LIFE_S, TYPICAL_TOKENS
from placement.scheduling.prefill_curve import PrefillCurve

RECENT_S = 2 * HALF_LIFE_S  # an engine counts for its hardware's typical speed this long after a prompt
BEST_MOVES = 0.1  # share of the way from the best curve to the reported curve that each report moves it
TYPICAL_EVERY_S = 1.0  # time after which the typical curve of a hardware is computed again


class EngineSpeed(NamedTuple):
    """Prefill-speed estimate of one engine at this moment."""

    reported: PrefillCurve | None  # None: the engine reports none
    estimate: PrefillCurve | None
    measured: bool  # on this engine or on engines of the same hardware; else the estimate is a guess
    tokens_per_s: float  # rate at which it computed prompts lately; 0 if it did not
    freshness: float  # weight of the engine's own measurements, from 1 towards 0


@dataclass(slots=True)
class SpeedHistory:
    """Measured speeds of one engine."""

    hardware: str
    prompts: int | None = None  # `EngineState.prompts` of its last report
    curve: PrefillCurve | None = None
    best: PrefillCurve | None = None  # fastest reported curve; each slower report moves it somewhat
    shown_at: float | None = None  # when it last computed a prompt


class EngineSpeeds:
    """Estimator of the prefill speeds of all engines."""

    def __init__(self, hardware_of: Mapping[str, str]) -> None:
        """Create an estimator without engines. `hardware_of` maps tiers of equal hardware to one name."""
        self._hardware_of = hardware_of
        self._engines: dict[str, SpeedHistory] = {}
        self._by_hardware: defaultdict[str, dict[str, SpeedHistory]] = defaultdict(dict)
        self._typical: dict[str, tuple[float, PrefillCurve | None]] = {}  # hardware -> when computed, curve

    def add(self, engine: str, tier: str) -> None:
        hardware = self._hardware_of.get(tier, tier)
        self._engines[engine] = self._by_hardware[hardware][engine] = SpeedHistory(hardware)

    def remove(self, engine: str) -> None:
        if (history := self._engines.pop(engine, None)) is not None:
            del self._by_hardware[history.hardware][engine]

    def observe(self, state: EngineState, now: float) -> EngineSpeed:
        """Apply an engine's report, and return the new estimate of its speed."""
        engine, tokens_per_s = self._engines[state.engine], state.prompt_tokens_per_s
        engine.curve = PrefillCurve(*state.prefill_curve) if state.prefill_curve else None
        if engine.curve is None:
            return EngineSpeed(None, None, False, tokens_per_s, 1.0)
        if state.prompts and state.prompts != engine.prompts:
            # The first report does not say how old its figures are, so they count as old.
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
        """Return the median curve of a hardware's engines that computed prompts recently, if any."""
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
