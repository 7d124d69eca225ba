"""What the operator sets for offline work."""

from dataclasses import dataclass, field

HOUR_S = 3600
MIN_WINDOW_S = HOUR_S
MAX_WINDOW_S = 7 * 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class BatchLimits:
    file_bytes: int = 2 << 30
    line_bytes: int = 16 << 20
    requests_per_batch: int = 1_000_000
    custom_id_chars: int = 512
    reported_errors: int = 100  # bad lines named in one failed batch; scanning stops there
    answer_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """How much offline work a decoder is fed, and what happens when a try fails."""

    queue_ahead: int = 4  # requests kept waiting inside an engine beyond those that run
    blind_window: int = 8  # in flight per engine while it reports no state
    max_in_flight: int = 256  # per engine and gateway
    keep_free_fraction: float = 0.10  # of an engine's KV, never planned for offline work
    minimum_in_flight: int = 0  # kept in flight per engine even when online turns wait there
    harvest_prefill: bool = False  # idle prefillers take offline work too
    tight_fraction: float = 0.25  # a batch whose estimated time needs this much head room is urgent
    urgent_share: float = 0.75  # of the dispatches, at most, that jump the fair order
    max_tries: int = 5
    suspect_after: int = 2  # failed tries, after which a request has no other such at its engine
    backoff_first_s: float = 1.0
    backoff_max_s: float = 60.0
    request_timeout_s: float = 3600.0
    cancel_grace_s: float = 30.0
    tick_s: float = 0.25
    gather_s: float = 0.005  # after a pass that sent something: the next one claims more at once
    lease_s: float = 10.0


@dataclass(frozen=True, slots=True)
class BatchConfig:
    store_url: str  # sqlite:///path or postgresql+psycopg://…
    files_url: str  # a folder or any fsspec URL
    limits: BatchLimits = field(default_factory=BatchLimits)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    flex_timeout_s: float = 900.0
    file_ttl_s: int | None = None  # uploaded and made files are deleted after this long; None keeps them
