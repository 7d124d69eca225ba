"""What an engine is to be: everything that its command line is made from."""

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from kvtransfer.config import ConnectorConfig
from placement.engines import Role


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


PLAIN_CPU_WORKER = "workers.cpu_worker.SeedSafeCpuWorker"

Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    engine: str  # its name in the fleet, as in decode-1
    tier: str
    role: Role
    model: str
    served_name: str
    device: Device
    directory: Path  # its own: record, lease, socket, log
    host: str = "127.0.0.1"  # where gateways and peers reach it
    dtype: str = "auto"
    max_context: int | None = None
    threads: int | None = None
    options: Options = ()  # vLLM's own, without the leading dashes
    env: tuple[tuple[str, str], ...] = ()
    connector: ConnectorConfig | None = None  # port, socket and epoch are filled in at each start
    scheduler_class: str | None = None
    worker_class: str | None = None
    additional: str | None = None  # JSON of vLLM's --additional-config

    def fingerprint(self) -> str:
        """Two specs with one fingerprint need the same engine: a running one may be adopted."""
        text = json.dumps(asdict(self), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    start_together: int | None = None  # engines of this host that may start at the same time; None: all
    start_limit_s: float = 900.0  # not healthy by then: failed
    stall_limit_s: float = 300.0  # nothing logged for so long while starting: failed
    warm_limit_s: float = 300.0
    tier_limit_s: float = 120.0  # the shared tier's server does not answer by then: the engine starts without
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    health_misses: int = 10  # in a row, before a restart
    lease_s: float = 60.0
    end_grace_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 60.0
    calm_after_s: float = 300.0  # serving for so long, the next failure starts again at the first back-off
