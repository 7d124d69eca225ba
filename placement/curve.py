"""The prefill curve: seconds of a prefiller's time as a function of the tokens it has to compute.

Attention makes the cost quadratic in the prompt, and the prompt's length is known at arrival, so that the
curve turns what can be read into what has to be known: when a prefiller will be free.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np


class CurveError(ValueError):
    """The samples or coefficients cannot be a prefill curve."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """seconds(n) = a + b*n + c*n*n, never falling as n grows."""

    a: float
    b: float
    c: float

    def __post_init__(self) -> None:
        if not all(isfinite(x) and x >= 0 for x in (self.a, self.b, self.c)) or self.b + self.c == 0:
            raise CurveError(
                f"prefill curve a={self.a} b={self.b} c={self.c}: coefficients must be finite, not negative, "
                "and grow with the tokens; profile the prefiller again"
            )

    def seconds(self, tokens: float) -> float:
        return self.a + tokens * (self.b + tokens * self.c)

    def seconds_after(self, context: float, tokens: float) -> float:
        """Cost of `tokens` more behind `context` tokens whose KV is already there."""
        return self.a + tokens * (self.b + self.c * (2 * context + tokens))

    def tokens_in(self, seconds: float) -> float:
        """The longest prompt that is prefilled within `seconds`: the inverse."""
        left = seconds - self.a
        if left <= 0:
            return 0.0
        if self.c == 0:
            return left / self.b
        # The textbook root (-b + sqrt(b² + 4c·left)) / 2c cancels badly for small c; this form does not.
        return 2 * left / (self.b + sqrt(self.b * self.b + 4 * self.c * left))

    def tokens_per_second(self, tokens: float) -> float:
        """Sustained input rate when all prompts have this length."""
        return tokens / self.seconds(tokens)


@dataclass(frozen=True, slots=True)
class Fit:
    curve: PrefillCurve
    median_error: float  # relative
    worst_error: float  # relative


def fit(samples: Sequence[tuple[float, float]]) -> Fit:
    """Fit (tokens, seconds) pairs by relative error, with coefficients that cannot be negative.

    Relative, because an absolute fit would let a 100k-token sample decide what a 500-token prompt costs.
    """
    from scipy.optimize import nnls

    points = np.asarray(samples, dtype=float).reshape(-1, 2)
    tokens, seconds = points[:, 0], points[:, 1]
    if len(np.unique(tokens)) < 3 or (tokens <= 0).any() or (seconds <= 0).any():
        raise CurveError("a prefill curve needs positive samples of at least three different prompt lengths")
    rows = np.stack([np.ones_like(tokens), tokens, tokens * tokens], axis=1) / seconds[:, None]
    scale = rows.max(axis=0)  # columns differ by ten orders of magnitude
    coefficients, _ = nnls(rows / scale, np.ones_like(tokens))
    a, b, c = (float(x) for x in coefficients / scale)
    curve = PrefillCurve(a, b, c)
    errors = np.abs(curve.a + tokens * (curve.b + tokens * curve.c) - seconds) / seconds
    return Fit(curve, float(np.median(errors)), float(errors.max()))
