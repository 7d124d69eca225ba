"""Settings of a keeper: limits and intervals."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """Limits and intervals for starting, watching and restarting an engine."""

    start_together: int | None = None  # engines of this host that may start at the same time; None: all
    start_limit_s: float = 900.0  # a start fails if the engine is not healthy within this time
    stall_limit_s: float = 300.0  # a start fails if the engine logs nothing for this long
    warm_limit_s: float = 300.0  # for the engine's first requests
    tier_limit_s: float = 120.0  # after which an engine starts without a shared tier that does not answer
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    health_misses: int = 10  # failed checks in a row that lead to a restart
    memory_gib: float | None = None  # limit for the engine; None: the default of `MemoryLimit.of`
    kv_gib: float = 0.0  # KV that the engine keeps in host memory
    lease_s: float = 60.0
    end_grace_s: float = 10.0
    drain_s: float = 120.0  # time for conversations to leave an engine that a signal asked to end
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 60.0
    calm_after_s: float = 300.0  # time of serving after which back-off starts over
