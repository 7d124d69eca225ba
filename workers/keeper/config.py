"""Settings of a keeper."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """Limits and intervals for starting, watching and restarting an engine."""

    start_together: int | None = None  # engines of this host that may start at the same time; None: all
    start_limit_s: float = 900.0  # a start fails if the engine is not healthy by then
    stall_limit_s: float = 300.0  # a start fails if the engine logs nothing for so long
    warm_limit_s: float = 300.0
    tier_limit_s: float = 120.0  # the engine starts without the shared tier if its server does not answer
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    health_misses: int = 10  # in a row, before a restart
    memory_gib: float | None = None  # an engine with more is restarted; None: `MemoryLimit.of`
    kv_gib: float = 0.0  # KV that the engine keeps in host memory
    lease_s: float = 60.0
    end_grace_s: float = 10.0
    drain_s: float = 120.0  # time for conversations to leave an engine that a signal asked to end
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 60.0
    calm_after_s: float = 300.0  # after serving for so long, back-off starts over
