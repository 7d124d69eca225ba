"""Metrics that a keeper publishes about its engine."""

from prometheus_client import Counter, Gauge, Histogram

ENGINE_UP = Gauge("conserve_engine_up", "1 while the engine serves, by its keeper's own check.", ["engine"])
ENGINE_STARTS = Counter(
    "conserve_engine_starts_total",
    "Starts of the engine by outcome: served, failed, adopted (it was already running).",
    ["engine", "outcome"],
)
ENGINE_LOST = Counter(
    "conserve_engine_lost_total",
    "Losses of a serving engine by cause: exited, unhealthy (it missed its health checks), memory (its "
    "processes exceeded the limit), asked_to_end (by SIGTERM, after its conversations had left).",
    ["engine", "cause"],
)
ENGINE_START_SECONDS = Histogram(
    "conserve_engine_start_seconds",
    "Time from an engine's start to its first answer.",
    ["engine"],
    buckets=(5, 10, 20, 40, 60, 90, 120, 180, 300, 600, 900),
)
HEALTH_MISSES = Counter(
    "conserve_engine_health_misses_total", "Health checks of a serving engine that failed.", ["engine"]
)
MEMORY_BYTES = Gauge(
    "conserve_engine_memory_bytes",
    "Anonymous memory of the engine's processes. Below the limit, shared pages count once for each process.",
    ["engine"],
)
MEMORY_LIMIT_BYTES = Gauge(
    "conserve_engine_memory_limit_bytes", "Memory at which the keeper restarts the engine.", ["engine"]
)
FAULTS_FOUND = Counter(
    "conserve_engine_faults_total",
    "Inconsistencies in the engine's bookkeeping of KV, found by its own check when the keeper connected.",
    ["engine"],
)
WITHOUT_TIER = Counter(
    "conserve_engine_without_tier_total",
    "Starts of an engine whose shared KV tier did not answer. It serves, but its KV is lost with it.",
    ["engine"],
)
NOT_WARMED = Counter(
    "conserve_engine_not_warmed_total",
    "Starts of an engine that failed to compute its warm-up prompts. Its first prompt takes longer.",
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
POWER_WATTS = Gauge("conserve_power_watts", "Present power draw of the engine's GPUs.", ["engine"])
POWER_LIMIT_WATTS = Gauge(
    "conserve_power_limit_watts", "Power limit of the engine's GPUs, summed.", ["engine"]
)
POWER_NOT_DONE = Counter(
    "conserve_power_caps_not_done_total",
    "Power caps that could not be set (no permission, no GPU, out of range). The engine serves without "
    "a cap.",
    ["engine"],
)


def from_zero(engine: str) -> None:
    """Create all series of an engine at zero, so that Prometheus sees each first event as an increase."""
    for outcome in ("served", "failed", "adopted"):
        ENGINE_STARTS.labels(engine, outcome)
    for cause in ("exited", "unhealthy", "memory", "asked_to_end"):
        ENGINE_LOST.labels(engine, cause)
    HEALTH_MISSES.labels(engine)
    NOT_WARMED.labels(engine)
    POWER_NOT_DONE.labels(engine)
    FAULTS_FOUND.labels(engine)
    ENGINE_UP.labels(engine)
