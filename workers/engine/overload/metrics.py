"""Metrics of engines that can drop layers, and the counts from which they are made."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from kvtransfer.metrics import CounterSpec, HistogramSpec
from workers.engine.overload.orders import SplitEvent, SplitReport

COUNTERS = {
    "splits": CounterSpec(
        "conserve_splits",
        "Drops and restores of layers, by how they ended. lost: a peer failed, requests were computed again.",
        "outcome",
        tuple(event for event in SplitEvent if event is not SplitEvent.READY),
    ),
    "split_batches": CounterSpec(
        "conserve_split_batches",
        "Batches through layers of several engines. own: sent to peers; peer: computed here for a peer.",
        "whose",
        ("own", "peer"),
    ),
    "split_peer_seconds": CounterSpec(
        "conserve_split_peer_seconds",
        "Time that own batches spent at peers: in transit, waiting for their turn, and computed.",
    ),
    "split_idle_seconds": CounterSpec(
        "conserve_split_idle_seconds",
        "Time that own batches spent at peers while nothing was computed here: the pipeline's bubble.",
    ),
    "split_served_seconds": CounterSpec(
        "conserve_split_served_seconds", "Time that batches of peers were computed here."
    ),
    "split_forgotten_blocks": CounterSpec(
        "conserve_split_forgotten_blocks",
        "Blocks that only the prefix cache held and that a drop or a restore evicted, because moving them "
        "would have taken the link more than a second.",
    ),
    "split_exchanged_bytes": CounterSpec(
        "conserve_split_exchanged_bytes",
        "Bytes of KV that moved to peers or back while the engine stood still, without the first message to "
        "each peer, which also waits for the peer.",
    ),
    "split_exchange_seconds": CounterSpec(
        "conserve_split_exchange_seconds",
        "Time that conserve_split_exchanged_bytes took. Their ratio is the link's rate, with which the next "
        "drop is planned.",
    ),
    "split_peer_bytes": CounterSpec("conserve_split_peer_bytes", "Bytes of own batches sent to peers."),
}
_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
HISTOGRAMS = {
    "drop_seconds": HistogramSpec(
        "conserve_split_drop_seconds", "Time that an engine stood still for a drop.", _BUCKETS
    ),
    "restore_seconds": HistogramSpec(
        "conserve_split_restore_seconds",
        "Time that an engine stood still to restore its layers, also after the loss of a peer.",
        _BUCKETS,
    ),
}

DEFAULT_LINK_BYTES_PER_S = 1e9  # assumed until an exchange has measured the link
MEASURED_BYTES = 1 << 20  # a smaller exchange would measure latency
MEASUREMENT_VALID_S = 600.0  # after which a drop that a slow exchange forbade may be tried again


class SplitStatistics:
    """Counts and times of splits since the last report, and the measured speed of the link."""

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
        """Forget the measured speed of the link if it is too old, and return whether it was forgotten now."""
        if self._link_bytes_per_s is None or self._clock() < self._valid_until:
            return False
        self._link_bytes_per_s = None
        return True

    def count(self, name: str, number: float = 1) -> None:
        self._counts[name] += number

    def add(self, report: SplitReport) -> None:
        """Count how long the order of a report stopped the engine, and how much KV it moved."""
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
