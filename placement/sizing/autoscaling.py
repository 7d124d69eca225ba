"""Autoscaling: decides how many replicas a tier should have from the share of its capacity in use."""

from dataclasses import dataclass, field
from math import ceil

from placement.sizing.capacity import Thresholds, TierLoad


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    least: int
    most: int
    thresholds: Thresholds = field(default_factory=Thresholds)
    cool_down_s: float = 120.0  # after a change, no other follows until its effect shows
    calm_s: float = 600.0  # how long the load must have been low before an engine is removed


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # empty where nothing changes


class TierScaler:
    """Scaler of a tier: adds all missing engines at once, and removes one at a time after a calm period."""

    def __init__(self, limits: ScaleLimits) -> None:
        self._limits = limits
        self._changed_at: float | None = None
        self._calm_since: float | None = None

    def decide(self, judged: TierLoad, replicas: int, now: float) -> Decision:
        """Return the number of replicas that the tier should have.

        `judged` is the load of all engines of the tier's role. The tier gets its present share of the engines
        that the role needs. `replicas` counts its engines that are up or starting.
        """
        limits, load = self._limits, judged.load
        within = min(max(replicas, limits.least), limits.most)
        if within != replicas:
            return self._change(within, f"the limits are {limits.least} to {limits.most}", now)
        enough = ceil(judged.enough * replicas / judged.engines) if judged.engines else replicas + 1
        if load > limits.thresholds.high:
            self._calm_since = None
            wanted = min(max(enough, replicas + 1), limits.most)
            if wanted > replicas and not self._cooling(now):
                return self._change(wanted, f"{load:.0%} in use, above {limits.thresholds.high:.0%}", now)
        elif load < limits.thresholds.low and enough < replicas and replicas > limits.least:
            if self._calm_since is None:
                self._calm_since = now
            if now - self._calm_since >= limits.calm_s and not self._cooling(now):
                reason = f"{load:.0%} in use, below {limits.thresholds.low:.0%} for {limits.calm_s:.0f} s"
                return self._change(replicas - 1, reason, now)
        else:
            self._calm_since = None
        return Decision(replicas, "")

    def _change(self, replicas: int, reason: str, now: float) -> Decision:
        self._changed_at, self._calm_since = now, None
        return Decision(replicas, reason)

    def _cooling(self, now: float) -> bool:
        return self._changed_at is not None and now - self._changed_at < self._limits.cool_down_s
