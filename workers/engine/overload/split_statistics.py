"""Statistics of splits on the scheduler's side: counts, times, and the speed of the link between engines."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from workers.engine.overload.orders import SplitEvent, SplitReport

DEFAULT_LINK_BYTES_PER_S = 1e9  # until an exchange has measured the link
MEASURED_BYTES = 1 << 20  # smaller exchanges measure latency
MEASUREMENT_VALID_S = 600.0  # so that a plan which a slow exchange forbids is tried again


class SplitStatistics:
    """Counts since the last report, and the measured speed of the link."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._link_bytes_per_s: float | None = None
        self._valid_until = 0.0

    @property
    def link_bytes_per_s(self) -> float:
        return self._link_bytes_per_s or DEFAULT_LINK_BYTES_PER_S

    def forget_old_measurement(self) -> bool:
        """Forget the link's measured speed if it is too old; return whether it just became so."""
        if self._link_bytes_per_s is None or self._clock() < self._valid_until:
            return False
        self._link_bytes_per_s = None
        return True

    def count(self, name: str, number: float = 1) -> None:
        self._counts[name] += number

    def add(self, report: SplitReport) -> None:
        """Count how long an order stopped the engine, and how much KV it moved."""
        dropped = report.event in (SplitEvent.SPLIT, SplitEvent.NOT_SPLIT)
        self._seconds["drop_seconds" if dropped else "restore_seconds"].append(report.seconds)
        if report.moved_bytes:
            self.count("split_exchanged_bytes", report.moved_bytes)
            self.count("split_exchange_seconds", report.moved_s)
        if report.moved_bytes >= MEASURED_BYTES and report.moved_s > 0:
            self._link_bytes_per_s = report.moved_bytes / report.moved_s
            self._valid_until = self._clock() + MEASUREMENT_VALID_S

    def take_counts(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, defaultdict(float)
        return counts

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        seconds, self._seconds = self._seconds, defaultdict(list)
        return seconds
