"""Metrics of a keeper and its engine."""

from prometheus_client import Counter, Gauge, Histogram

ENGINE_UP = Gauge("conserve_engine_up", "1 while the engine serves, by its keeper's own check.", ["engine"])
ENGINE_STARTS = Counter(
    "conserve_engine_starts_total",
    "Starts of the engine by outcome: served, failed, or adopted (it was running already).",
    ["engine", "outcome"],
)
ENGINE_LOST = Counter(
    "conserve_engine_lost_total",
    "Times a serving engine was lost, by cause: exited, unhealthy (it missed its health checks), or memory "
    "(its processes had more than they may have).",
    ["engine", "cause"],
)
ENGINE_START_SECONDS = Histogram(
    "conserve_engine_start_seconds",
    "From starting an engine to its first answer.",
    ["engine"],
    buckets=(5, 10, 20, 40, 60, 90, 120, 180, 300, 600, 900),
)
HEALTH_MISSES = Counter(
    "conserve_engine_health_misses_total", "Health checks of a serving engine that failed.", ["engine"]
)
MEMORY_BYTES = Gauge(
    "conserve_engine_memory_bytes",
    "Anonymous memory of the engine's processes; pages that they share count more than once below the limit.",
    ["engine"],
)
MEMORY_LIMIT_BYTES = Gauge(
    "conserve_engine_memory_limit_bytes", "Memory at which the keeper restarts the engine.", ["engine"]
)
FAULTS_FOUND = Counter(
    "conserve_engine_faults_total",
    "Faults in the bookkeeping of KV that the engine's check found when its keeper connected to it.",
    ["engine"],
)
WITHOUT_TIER = Counter(
    "conserve_engine_without_tier_total",
    "Starts of an engine whose shared tier did not answer: it serves, but a lost decoder's KV is lost.",
    ["engine"],
)
NOT_WARMED = Counter(
    "conserve_engine_not_warmed_total",
    "Starts of an engine that did not compute the prompts which warm it: its first prompt takes longer.",
    ["engine"],
)
TIER_STARTS = Counter(
    "conserve_shared_tier_starts_total", "Times this keeper started its node's LMCache server."
)
ENERGY_JOULES = Counter(
    "conserve_energy_joules_total",
    "Energy of the engine's GPUs by NVML's counter, by the engine's role (prefill, decode, mixed).",
    ["engine", "role"],
)
POWER_WATTS = Gauge("conserve_power_watts", "What the engine's GPUs draw now.", ["engine"])
POWER_LIMIT_WATTS = Gauge(
    "conserve_power_limit_watts", "Power limit of the engine's GPUs, summed.", ["engine"]
)
POWER_NOT_DONE = Counter(
    "conserve_power_caps_not_done_total",
    "Power caps that could not be set (no permission, no GPU, out of range); the engine serves without.",
    ["engine"],
)


def from_zero(engine: str) -> None:
    """Create all series at zero, so that Prometheus sees the first event of each as an increase."""
    for outcome in ("served", "failed", "adopted"):
        ENGINE_STARTS.labels(engine, outcome)
    for cause in ("exited", "unhealthy", "memory"):
        ENGINE_LOST.labels(engine, cause)
    HEALTH_MISSES.labels(engine)
    NOT_WARMED.labels(engine)
    POWER_NOT_DONE.labels(engine)
    FAULTS_FOUND.labels(engine)
    ENGINE_UP.labels(engine)
