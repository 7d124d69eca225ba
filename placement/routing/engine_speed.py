"""Estimates of each engine's prefill speed, from its own reports and from engines of the same hardware."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

from placement.engines import EngineState
from placement.routing.prefill_queue import HALF_LIFE_S, TYPICAL
from placement.scheduling.prefill_curve import PrefillCurve

LATELY_S = 2 * HALF_LIFE_S  # engines that computed a prompt so long ago say how fast their like are
BEST_MOVES = 0.1  # of the way to what an engine shows, at each report of it
TAKEN_EVERY_S = 1.0  # how often that is looked up


class Speed(NamedTuple):
    """Of one engine now."""

    own: PrefillCurve | None  # None: it reports none
    curve: PrefillCurve | None  # as it is taken to be
    shown: bool  # by it or by its like; else the curve is a guess
    rate: float  # of prompts, tokens a second; 0 where it is old
    fresh: float  # share of what it has shown that counts


@dataclass(slots=True)
class EngineSpeed:
    kind: str
    prompts: int | None = None  # that it reported last
    curve: PrefillCurve | None = None
    best: PrefillCurve | None = None  # that it has shown, moving to what it shows now
    shown_at: float | None = None


class Speeds:
    """What a prompt is taken to cost on each engine."""

    def __init__(self, alike: Mapping[str, str]) -> None:
        """`alike`: tiers of the same hardware have the same name there. A tier that is not named is only
        like itself."""
        self._alike = alike
        self._engines: dict[str, EngineSpeed] = {}
        self._kinds: defaultdict[str, dict[str, EngineSpeed]] = defaultdict(dict)
        self._typical: dict[str, tuple[float, PrefillCurve | None]] = {}  # of a kind, and when it was taken

    def add(self, engine: str, tier: str) -> None:
        kind = self._alike.get(tier, tier)
        self._engines[engine] = self._kinds[kind][engine] = EngineSpeed(kind)

    def remove(self, engine: str) -> None:
        if (speed := self._engines.pop(engine, None)) is not None:
            del self._kinds[speed.kind][engine]

    def observe(self, state: EngineState, now: float) -> Speed:
        engine, rate = self._engines[state.engine], state.prompt_tokens_per_s
        engine.curve = PrefillCurve(*state.prefill_curve) if state.prefill_curve else None
        if engine.curve is None:
            return Speed(None, None, False, rate, 1.0)
        if state.prompts and state.prompts != engine.prompts:
            # Of the first report nobody knows how old what it says is.
            engine.shown_at = now if engine.prompts is not None else now - LATELY_S
            engine.best = _faster(
                engine.curve, _between(engine.best or engine.curve, engine.curve, BEST_MOVES)
            )
            if self._typical.get(engine.kind, (0.0, None))[1] is None:
                self._typical.pop(engine.kind, None)
        engine.prompts = state.prompts
        if engine.shown_at is None:
            typical = self._typical_of(engine.kind, now)
            return Speed(engine.curve, typical or engine.curve, typical is not None, rate, 1.0)
        fresh = 0.5 ** ((now - engine.shown_at) / HALF_LIFE_S)
        if engine.shown_at <= now - LATELY_S:
            rate = 0.0  # the curve says better what it would be
        like = self._typical_of(engine.kind, now) or engine.best or engine.curve
        taken = _faster(engine.curve, _between(like, engine.curve, fresh))
        return Speed(engine.curve, taken, True, rate, fresh)

    def _typical_of(self, kind: str, now: float) -> PrefillCurve | None:
        """Of those that computed prompts lately the middle one; None where none did."""
        taken_at, typical = self._typical.get(kind, (float("-inf"), None))
        if now < taken_at + TAKEN_EVERY_S:
            return typical
        lately = sorted(
            (
                one.curve
                for one in self._kinds[kind].values()
                if one.curve is not None and one.shown_at is not None and one.shown_at > now - LATELY_S
            ),
            key=lambda curve: curve.seconds(TYPICAL),
        )
        typical = lately[(len(lately) - 1) // 2] if lately else None
        self._typical[kind] = now, typical
        return typical


def _between(one: PrefillCurve, other: PrefillCurve, share: float) -> PrefillCurve:
    """So much of the way from the one to the other."""
    pairs = zip(astuple(one), astuple(other), strict=True)
    return PrefillCurve(*(a + share * (b - a) for a, b in pairs))


def _faster(one: PrefillCurve, other: PrefillCurve) -> PrefillCurve:
    return one if one.seconds(TYPICAL) <= other.seconds(TYPICAL) else other
