"""How full the fleet is: the two signals the placer observes, averaged over a window, and nothing predicted.

Prefill: seconds of prefiller time that arrive each second (prompt lengths through the curve). Decoders: share
of the pool's KV that is in use. Averaged, so that one long prompt is not an alarm.
"""

from dataclasses import dataclass
from math import exp, inf


@dataclass(frozen=True, slots=True)
class Signals:
    prefillers: int
    prefill_load: float  # seconds of prompts that arrive a second and a prefiller; 1 is saturation
    prefill_wait_s: float  # of the shortest queue, now
    decoders: int
    decoder_pressure: float  # share of what the decoders may hold that is in use and cannot give way
    running_share: float  # the same of conversations with a turn under way, now: the rest waits for its turn
    observed_s: float  # how long has been looked at; less than the window says little

    def saturates_in_s(self, longest_wait_s: float) -> float:
        """Until even the shortest queue is longer than allowed, at this rate; infinite if none grows."""
        if self.prefill_wait_s >= longest_wait_s:
            return 0.0
        growth = self.prefill_load - 1.0
        return (longest_wait_s - self.prefill_wait_s) / growth if growth > 0 else inf


class CapacityWatch:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began: float | None = None
        self._demand = 0.0  # prefill seconds a second
        self._demand_at = 0.0
        self._pressure: float | None = None
        self._pressure_at = 0.0

    def arrived(self, prefill_s: float, now: float) -> None:
        """A turn came that wants a prefiller, whether or not it could be placed."""
        self._begin(now)
        self._demand = self._demand * self._kept(now - self._demand_at) + prefill_s / self._window_s
        self._demand_at = now

    def observed(self, decoder_pressure: float, now: float) -> None:
        self._begin(now)
        keep = 0.0 if self._pressure is None else self._kept(now - self._pressure_at)
        self._pressure = keep * (self._pressure or 0.0) + (1 - keep) * decoder_pressure
        self._pressure_at = now

    def signals(
        self, prefillers: int, prefill_wait_s: float, decoders: int, running_share: float, now: float
    ) -> Signals:
        demand = self._demand * self._kept(now - self._demand_at)
        load = demand / prefillers if prefillers else (inf if demand > 1e-3 else 0.0)
        observed_s = 0.0 if self._began is None else now - self._began
        pressure = self._pressure or 0.0
        return Signals(prefillers, load, prefill_wait_s, decoders, pressure, running_share, observed_s)

    def _begin(self, now: float) -> None:
        if self._began is None:
            self._began = now

    def _kept(self, elapsed: float) -> float:
        return exp(-max(0.0, elapsed) / self._window_s)
