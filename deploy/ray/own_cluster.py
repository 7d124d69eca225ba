"""A Ray cluster on this machine alone: a head that only keeps tables, and a node that carries the fleet.

Two processes rather than one, because a lost head takes its own node with it.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deploy.fleet import Fleet
from deploy.home import FleetHome
from deploy.ray.settings import LOOPBACK, ray_command

CONTROL = "conserve_control"  # the resource that places the directory and the gateways
PLENTY = 10_000.0


@dataclass(frozen=True, slots=True)
class OwnCluster:
    port: int
    client_port: int
    temporary: Path
    resources: dict[str, float]
    object_store_bytes: int
    dashboard: bool

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    @classmethod
    def of(cls, fleet: Fleet, home: FleetHome, port: int, client_port: int) -> "OwnCluster":
        return cls(
            port=port,
            client_port=client_port,
            temporary=temporary_directory(home),
            resources=resources_of(fleet),
            object_store_bytes=fleet.ray.object_store_mib << 20,
            dashboard=fleet.ray.dashboard,
        )

    def head_argv(self) -> list[str]:
        return [
            *(*ray_command(), "start", "--head", "--block", "--port", str(self.port)),
            *("--ray-client-server-port", str(self.client_port), "--temp-dir", str(self.temporary)),
            *("--num-cpus", "0", "--num-gpus", "0", "--include-dashboard", str(self.dashboard).lower()),
            *self._common(),
        ]

    def node_argv(self) -> list[str]:
        return [
            *(*ray_command(), "start", "--block", "--address", self.address),
            *("--resources", json.dumps(self.resources)),
            *self._common(),
        ]

    def _common(self) -> list[str]:
        return [
            *("--node-ip-address", LOOPBACK, "--disable-usage-stats", "--include-log-monitor", "false"),
            *("--object-store-memory", str(self.object_store_bytes)),
        ]


def temporary_directory(home: FleetHome) -> Path:
    """Ray's sockets and logs. Not below the fleet's own directory: the path of a socket may not be long."""
    digest = hashlib.sha256(str(home.root).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"conserve-{os.getuid()}-{digest}"


def resources_of(fleet: Fleet) -> dict[str, float]:
    """Custom resources say on which nodes a tier may be: here there is one, and it is good for any number of
    engines. Ray finds CPUs and GPUs by itself."""
    names = {CONTROL, *fleet.ray.control_resources}
    for tier in fleet.tiers:
        names |= tier.resources.keys() - {"CPU", "GPU", "memory"}
    return dict.fromkeys(sorted(names), PLENTY)
