"""Figures of a step of the GPU benchmark, with their units in their names."""

import statistics
from collections.abc import Sequence

Figures = dict[str, float | bool | str]


def spread(name: str, seconds: Sequence[float]) -> Figures:
    """Return median, p90 and maximum in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"{name}_ms": statistics.median(ordered) * 1e3,
        f"{name}_p90_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))] * 1e3,
        f"{name}_max_ms": ordered[-1] * 1e3,
    }


def bandwidth(name: str, nbytes: int, seconds: Sequence[float]) -> Figures:
    """Return the median round's bandwidth and the slowest round's."""
    return {
        f"{name}_gbs": nbytes / statistics.median(seconds) / 1e9,
        f"{name}_slowest_gbs": nbytes / max(seconds) / 1e9,
    }
