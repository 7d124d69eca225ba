"""Tokens a second of offline work lately, in the units requests are estimated in."""

import math
from collections.abc import Callable

_SPAN_S = 60.0


class Rate:
    """Exponentially weighted over about a minute; 0 until something has finished."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: float | None = None
        self._weighted = 0.0
        self._at = 0.0

    def add(self, tokens: int) -> None:
        now = self._clock()
        if self._started is None:
            self._started = self._at = now
        self._weighted = self._weighted * math.exp(-(now - self._at) / _SPAN_S) + tokens
        self._at = now

    @property
    def value(self) -> float:
        if self._started is None:
            return 0.0
        now = self._clock()
        kept = self._weighted * math.exp(-(now - self._at) / _SPAN_S)
        seen = _SPAN_S * (1 - math.exp(-(now - self._started) / _SPAN_S))
        return kept / max(seen, 1.0)
