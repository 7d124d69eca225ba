"""Mean of a value over recent time, for rules that must not react to every single change."""

from dataclasses import dataclass
from math import exp


@dataclass(slots=True)
class TimeMean:
    """Exponentially weighted mean over about `window_s`; each observed value holds until the next one."""

    window_s: float
    mean: float = 0.0
    _value: float = 0.0
    _at: float | None = None

    def observe(self, value: float, now: float) -> None:
        self.until(now)
        self._value = value

    def until(self, now: float) -> float:
        """Return the mean at the time `now`, up to which the last observed value holds."""
        if self._at is not None:
            kept = exp(-max(0.0, now - self._at) / self.window_s)
            self.mean = kept * self.mean + (1 - kept) * self._value
        self._at = now
        return self.mean
