"""Times between single tokens. A turn's mean TBT hides an iteration that stalled; this does not."""

from __future__ import annotations  # array is generic to type checkers only

from array import array

import numpy as np


class Gaps:
    def __init__(self) -> None:
        self._seconds = array("f")
        self._tokens = array("l")

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens came after so long each: the mean of a phase in which the batch did not change."""
        self._seconds.append(seconds)
        self._tokens.append(tokens)

    def percentile(self, p: float) -> float:
        order = np.argsort(np.asarray(self._seconds), kind="stable")
        counted = np.cumsum(np.asarray(self._tokens)[order])
        at = int(np.searchsorted(counted, counted[-1] * p / 100.0))
        return float(np.asarray(self._seconds)[order[min(at, len(order) - 1)]])

    def share_above(self, seconds: float) -> float:
        tokens = np.asarray(self._tokens)
        return float(tokens[np.asarray(self._seconds) > seconds].sum() / tokens.sum())
