"""Power draw and compute speed of an accelerator under a power cap.

The power draw has three levels: idle, decoding (memory-bound) and prefill (compute-bound). A cap cuts the
levels above it, and slows compute down: its speed is proportional to (dynamic power) ** exponent, because
dynamic power grows faster than the clock. Memory reads do not slow down, as the conversation paper measured.
"""

from dataclasses import dataclass, replace

from placement import PlacementError


class PowerCurveError(PlacementError, ValueError):
    """Error: the values of a power curve or cap contradict each other."""


@dataclass(frozen=True, slots=True)
class PowerCurve:
    limit_w: float
    idle_w: float
    decode_w: float
    prefill_w: float
    speed_exponent: float = 1 / 3  # dynamic power is proportional to voltage² x clock, so to clock³

    def __post_init__(self) -> None:
        if not 0 <= self.idle_w <= self.decode_w <= self.limit_w or not self.idle_w < self.prefill_w:
            raise PowerCurveError(
                f"{self}: expected 0 <= idle_w <= decode_w <= limit_w and idle_w < prefill_w"
            )
        if self.prefill_w > self.limit_w:
            raise PowerCurveError(f"{self}: prefill_w is above limit_w")

    def compute_speed(self, cap_w: float) -> float:
        """Return the speed of compute-bound work under a cap, as a share of the speed without a cap."""
        if cap_w <= self.idle_w:
            raise PowerCurveError(f"a cap of {cap_w} W is not above the idle draw of {self.idle_w} W")
        if cap_w >= self.prefill_w:
            return 1.0
        return float(((cap_w - self.idle_w) / (self.prefill_w - self.idle_w)) ** self.speed_exponent)

    def capped(self, cap_w: float) -> "PowerCurve":
        """Return this curve under a power cap."""
        self.compute_speed(cap_w)  # raises if the cap is too low
        return replace(
            self,
            limit_w=min(self.limit_w, cap_w),
            decode_w=min(self.decode_w, cap_w),
            prefill_w=min(self.prefill_w, cap_w),
        )

    def joules(self, idle_s: float, decode_s: float, prefill_s: float) -> float:
        return self.idle_w * idle_s + self.decode_w * decode_s + self.prefill_w * prefill_s
