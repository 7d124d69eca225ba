"""A Ray cluster on this machine alone: a head that only keeps tables, and a node that carries the fleet.

Two processes rather than one, because a lost head takes its own node with it. The head may be lost for ten
minutes, and only who has the token gets in.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.fleet import FleetSpec
from deploy.home import FleetHome
from workers.launch import FLEET_MARK
from workers.processes import with_our_packages

CONTROL = "conserve_control"  # the resource that places the directory and the gateways
PLENTY = 10_000.0
HEAD_LOSS_BRIDGED_S = 600
# Not 127.0.0.1, which Ray replaces by the machine's address: that changes when a laptop changes networks.
LOOPBACK = "127.0.0.2"


@dataclass(frozen=True, slots=True)
class OwnCluster:
    fleet: FleetSpec
    home: FleetHome
    port: int
    client_port: int

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def head_argv(self) -> list[str]:
        dashboard = str(self.fleet.ray.dashboard).lower()
        return self._start(
            *("--head", "--port", str(self.port), "--ray-client-server-port", str(self.client_port)),
            *("--temp-dir", str(temporary_directory(self.home)), "--include-dashboard", dashboard),
            *("--num-cpus", "0", "--num-gpus", "0"),
        )

    def node_argv(self) -> list[str]:
        return self._start("--address", self.address, "--resources", json.dumps(resources_of(self.fleet)))

    def _start(self, *options: str) -> list[str]:
        return [
            *(*ray_command(), "start", "--block", *options),
            *("--node-ip-address", LOOPBACK, "--disable-usage-stats", "--include-log-monitor", "false"),
            *("--object-store-memory", str(self.fleet.ray.object_store_mib << 20)),
        ]


def temporary_directory(home: FleetHome) -> Path:
    """Ray's sockets and logs. Not below the fleet's own directory: the path of a socket may not be long."""
    digest = hashlib.sha256(str(home.root).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"conserve-{os.getuid()}-{digest}"


def resources_of(fleet: FleetSpec) -> dict[str, float]:
    """Custom resources say on which nodes a tier may be: here there is one, and it is good for any number of
    engines. Ray finds CPUs and GPUs by itself."""
    names = {CONTROL, *fleet.ray.control_resources}
    for tier in fleet.tiers:
        names |= tier.resources.keys() - {"CPU", "GPU", "memory"}
    return dict.fromkeys(sorted(names), PLENTY)


def namespace(fleet: str) -> str:
    return f"conserve-{fleet}"


def common_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For every process that starts or joins Ray, ours or not. Ray reads it when it is imported."""
    ours = with_our_packages(environ)
    env = {name: value for name, value in ours.items() if not name.startswith("RAY_")}
    env["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(HEAD_LOSS_BRIDGED_S)
    env["RAY_DEDUP_LOGS"] = "0"
    env["RAY_raylet_start_wait_time_s"] = "120"  # a busy machine takes more than Ray's 30
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    env["RAY_worker_niceness"] = "0"  # engines and gateways inherit it; Ray's own is 15
    return env


def own_cluster_environment(home: FleetHome, environ: Mapping[str, str]) -> dict[str, str]:
    env = common_environment(environ)
    env[FLEET_MARK] = home.mark
    env["RAY_AUTH_MODE"] = "token"
    env["RAY_AUTH_TOKEN_PATH"] = str(home.ray_token())
    return env


def head_environment(home: FleetHome, environ: Mapping[str, str]) -> dict[str, str]:
    """The head keeps its tables on disk: restarted, it knows nodes and actors, and nothing else stops."""
    env = own_cluster_environment(home, environ)
    env["RAY_gcs_storage"] = "rocksdb"
    env["RAY_gcs_storage_path"] = str(home.ray / "gcs")
    return env


def ray_command() -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts"]
