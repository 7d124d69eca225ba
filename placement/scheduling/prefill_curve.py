"""Prefill curve: how long the prefill of a prompt takes on an idle engine, by the prompt's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from placement import PlacementError
from placement.scheduling.latency_model import BatchWork, LatencyModel

PROMPTS = (256, 1024, 4096, 8192, 16384, 32768, 65536, 131072)  # prompt lengths that a curve is fitted to


class CurveError(PlacementError, ValueError):
    """Error: the samples or coefficients cannot be a prefill curve."""


@dataclass(frozen=True, slots=True)
class PrefillCurve:
    """Prefill time of a prompt that runs alone: seconds(n) = a + b*n + c*n*n, never less for a larger n."""

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


def curve_of(model: LatencyModel, chunk_tokens: int) -> PrefillCurve:
    """Return the curve of an engine with this latency model that prefills in chunks of `chunk_tokens`."""
    return fit_curve([(tokens, prompt_seconds(model, chunk_tokens, tokens)) for tokens in PROMPTS])


def prompt_seconds(model: LatencyModel, chunk_tokens: int, prompt: int, cached: int = 0) -> float:
    """Return the prefill time of a prompt on an idle engine if its first `cached` tokens are cached."""
    return sum(
        model.seconds(BatchWork().plus(min(chunk_tokens, prompt - context), context))
        for context in range(cached, prompt, chunk_tokens)
    )


def fit_curve(samples: Sequence[tuple[float, float]]) -> PrefillCurve:
    """Fit a curve to (tokens, seconds) pairs by relative error, without negative coefficients.

    The error is relative, because otherwise a 100k-token sample would decide what a 500-token prompt costs.
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
    return PrefillCurve(a, b, c)
