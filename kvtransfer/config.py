"""Settings of one engine's connector, from which vLLM's `--kv-transfer-config` is made."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvtransfer import KVTransferError
from placement.prefetch_rules import PARK_AFTER_S

SECRET_VARIABLE = "CONSERVE_TRANSFER_SECRET"
CONNECTOR = "ConServeConnector"
CONNECTOR_MODULE = "kvtransfer.connector"
SEVERAL = "SeveralConnectors"
SEVERAL_MODULE = "kvtransfer.connector"
LMCACHE = "GuardedLMCache"
LMCACHE_MODULE = "kvtransfer.lmcache"


class ConnectorConfigError(KVTransferError, ValueError):
    """The connector's settings cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Settings of the connector of one engine in one epoch."""

    engine: str = "engine"
    epoch: int = 0
    transfer: bool = True  # False: the engine neither sends nor fetches, and needs no secret
    backend: str = "tcp"  # "tcp" is our own transfer, "nixl" is NIXL's connector
    host: str = "127.0.0.1"  # where peers reach this engine's transfer server
    port: int = 0  # transfer server of rank 0; rank r listens on port + r; 0: no server
    lease_s: float = 60.0  # how long a finished prefill's KV waits for its decoder
    timeout_s: float = 30.0  # longest silence of a peer before a transfer is given up
    encrypt: bool = False  # encrypt blocks between engines; otherwise the network can read prompts' KV
    staging_gib: float = 0.25  # GPU only: pinned host memory of all ranks, through which transfers pass
    control_socket: str = ""  # path of the Unix socket to the keeper; empty: none
    park_after_s: float = PARK_AFTER_S  # idle time after which a conversation is parked
    ttl_s: float | None = None  # idle time after which a conversation is forgotten; None: never
    host_kv_gib: float = 0.0  # host memory for checkpoints; 0: no checkpoint, nothing can be parked
    disk_gib: float = 0.0  # disk space behind the host memory, of all ranks; 0: none
    disk_path: str = ""  # folder of the file on the disk
    idle_kv_evictable: bool = False  # idle conversations' KV may be evicted without a copy on the host
    lmcache: str = ""  # host:port of LMCache's server, the tier behind the host; empty: none
    lmcache_timeout_s: float = 1.0  # longest wait for LMCache's server within a step
    # False: no plugin has work between layers, so that every step may run as one CUDA graph. KV is then
    # exported after steps instead of layer by layer.
    layer_hooks: bool = True
    safepoint: str = ""  # shared memory name of the safepoint flag; empty: no safepoints
    plugins: tuple[str, ...] = ()  # additional plugins, as "module:Class"

    def __post_init__(self) -> None:
        for name in ("lease_s", "timeout_s", "park_after_s", "ttl_s"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConnectorConfigError(f"{name} must be above 0, not {value!r}")
        if self.staging_gib <= 0:
            raise ConnectorConfigError(f"staging_gib must be above 0, not {self.staging_gib!r}")
        if self.host_kv_gib < 0:
            raise ConnectorConfigError(f"host_kv_gib must be 0 or more, not {self.host_kv_gib!r}")
        if self.disk_gib < 0:
            raise ConnectorConfigError(f"disk_gib must be 0 or more, not {self.disk_gib!r}")
        if self.disk_gib and not (self.host_kv_gib and self.disk_path):
            raise ConnectorConfigError("disk_gib needs disk_path, and host_kv_gib above 0")
        if self.backend not in ("tcp", "nixl"):
            raise ConnectorConfigError(f"backend must be tcp or nixl, not {self.backend!r}")
        if self.encrypt and self.backend != "tcp":
            raise ConnectorConfigError("encrypt needs backend tcp: NIXL does not encrypt")
        if self.lmcache and not self.lmcache.rpartition(":")[2].isdigit():
            raise ConnectorConfigError(f"lmcache must be host:port, not {self.lmcache!r}")
        if self.lmcache and self.safepoint:
            raise ConnectorConfigError("lmcache excludes safepoint: it would store KV of aborted steps")
        if not 0 <= self.port < 65536:
            raise ConnectorConfigError(f"port must be between 0 and 65535, not {self.port!r}")

    def to_extra_config(self) -> dict[str, Any]:
        return {**asdict(self), "plugins": list(self.plugins)}

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "ConnectorConfig":
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(extra) - known):
            raise ConnectorConfigError(f"unknown connector settings {unknown}; known are {sorted(known)}")
        values = dict(extra)
        if "plugins" in values:
            values["plugins"] = tuple(values["plugins"])
        return cls(**values)

    @property
    def own_transfer(self) -> bool:
        return self.transfer and self.backend == "tcp"

    def to_kv_transfer_config(self) -> dict[str, Any]:
        """Return the value of vLLM's `--kv-transfer-config`."""
        ours = _connector(CONNECTOR, CONNECTOR_MODULE, self.to_extra_config())
        # vLLM asks them in this order: NIXL transfers, ours retains, LMCache is the tier behind.
        connectors = [ours]
        if self.transfer and self.backend == "nixl":
            lease_s = max(6, int(self.lease_s))
            connectors.insert(0, _connector("NixlConnector", "", {"kv_lease_duration": lease_s}))
        if self.lmcache:
            host, _, port = self.lmcache.rpartition(":")
            lmcache = {
                "lmcache.mp.host": f"tcp://{host}",
                "lmcache.mp.port": int(port),
                "lmcache.mp.mq_timeout": self.lmcache_timeout_s,  # by default a step hangs for 300 s
                "lmcache.mp.heartbeat_interval": self.lmcache_timeout_s,
            }
            connectors.append(_connector(LMCACHE, LMCACHE_MODULE, lmcache))
        if len(connectors) == 1:
            return ours
        return _connector(SEVERAL, SEVERAL_MODULE, {"connectors": connectors})

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the engine needs; NIXL takes its port only from there."""
        if not (self.transfer and self.backend == "nixl"):
            return {}
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": self.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}


def _connector(name: str, module: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": name,
        **({"kv_connector_module_path": module} if module else {}),
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",  # with vLLM's default the client gets a 500
        "kv_connector_extra_config": extra,
    }


def transfer_secret(environ: Mapping[str, str] = os.environ) -> bytes:
    """Read the transfer key from the environment, because arguments are visible to every local user."""
    secret = environ.get(SECRET_VARIABLE, "")
    if len(secret) < 16:
        raise ConnectorConfigError(
            f"{SECRET_VARIABLE} must hold the key of transfers, at least 16 characters"
        )
    return secret.encode()


GIB = 1 << 30
SECTOR_BYTES = 4096  # addresses, lengths and offsets of direct I/O are multiples of it on all usual disks


def host_slots(config: ConnectorConfig, ranks: int, block_bytes: int) -> int:
    """Return how many blocks fit into `host_kv_gib`, which all ranks share.

    `block_bytes` is the size of a block on one rank.
    """
    return int(config.host_kv_gib * GIB) // (block_bytes * ranks)


def disk_row_bytes(block_bytes: int) -> int:
    """Return how many bytes a block of one rank takes on the disk: whole sectors, as direct I/O requires."""
    return -(-block_bytes // SECTOR_BYTES) * SECTOR_BYTES


def disk_slots(config: ConnectorConfig, ranks: int, block_bytes: int) -> int:
    """Return how many blocks fit into `disk_gib`, which all ranks share."""
    return int(config.disk_gib * GIB) // (disk_row_bytes(block_bytes) * ranks)
