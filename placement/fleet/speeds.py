"""What a prompt is taken to cost on each engine: its own curve, and that of its like where its own is old.

An engine's curve follows the prompts it computes. One that was slow while it started, or while something else
had its machine, would get no prompts for that, and without prompts it never shows that it is faster: so what
an engine has shown counts less the longer ago it was, and what engines of the same hardware show counts
instead. Nobody is taken to be slower than it has shown.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

from placement.engines import EngineState
from placement.fleet.prefillers import TYPICAL, PrefillCurve

HALF_LIFE_S = 20.0  # of what an engine has shown
LATELY_S = 2 * HALF_LIFE_S  # engines that computed a prompt so long ago say how fast their like are
TAKEN_EVERY_S = 1.0  # how often that is looked up


class Speed(NamedTuple):
    """Of one engine now."""

    curve: PrefillCurve | None  # None: it reports none
    shown: bool  # by it or by its like; else it is a guess
    rate: float  # of prompts, tokens a second; 0 where it is old
    kept: float  # of what was learned of its queue before its last report


@dataclass(slots=True)
class EngineSpeed:
    kind: str
    rate: float = 0.0  # that it reported last
    curve: PrefillCurve | None = None
    shown_at: float | None = None
    seen_at: float = 0.0


class Speeds:
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
        engine = self._engines[state.engine]
        since, engine.seen_at = now - engine.seen_at, now
        engine.curve = PrefillCurve(*state.prefill_curve) if state.prefill_curve else None
        if computed := state.prompt_tokens_per_s != engine.rate:  # an average that each prompt moves
            engine.rate, engine.shown_at = state.prompt_tokens_per_s, now
        kept = 1.0 if computed else 0.5 ** (since / HALF_LIFE_S)
        lately = engine.shown_at is not None and engine.shown_at >= now - LATELY_S
        curve, shown = self._curve(engine, now)
        return Speed(curve, shown, engine.rate if lately else 0.0, kept)

    def _curve(self, engine: EngineSpeed, now: float) -> tuple[PrefillCurve | None, bool]:
        """And whether it, or its like, has shown it."""
        own, typical = engine.curve, self._typical_of(engine.kind, now)
        if own is None or typical is None:
            return own, engine.shown_at is not None
        if engine.shown_at is None:
            return typical, True
        if own.seconds(TYPICAL) <= typical.seconds(TYPICAL):
            return own, True
        fresh = 0.5 ** ((now - engine.shown_at) / HALF_LIFE_S)
        pairs = zip(astuple(own), astuple(typical), strict=True)
        return PrefillCurve(*(fresh * mine + (1 - fresh) * theirs for mine, theirs in pairs)), True

    def _typical_of(self, kind: str, now: float) -> PrefillCurve | None:
        """Of those that computed prompts lately the middle one; None where none did."""
        taken_at, typical = self._typical.get(kind, (float("-inf"), None))
        if now < taken_at + TAKEN_EVERY_S and typical is not None:
            return typical
        lately = sorted(
            (
                one.curve
                for one in self._kinds[kind].values()
                if one.curve is not None and one.shown_at is not None and one.shown_at >= now - LATELY_S
            ),
            key=lambda curve: curve.seconds(TYPICAL),
        )
        typical = lately[(len(lately) - 1) // 2] if lately else None
        self._typical[kind] = now, typical
        return typical
