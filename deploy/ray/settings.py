"""Ray as a fleet needs it: its head may be lost for ten minutes, and only who has the token gets in."""

import sys
from collections.abc import Mapping

from deploy.home import FleetHome
from workers.command import FLEET_MARK
from workers.importable import with_our_packages

HEAD_LOSS_BRIDGED_S = 600
# Not 127.0.0.1, which Ray replaces by the machine's address: that changes when a laptop changes networks.
LOOPBACK = "127.0.0.2"


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
    env["RAY_worker_niceness"] = (
        "0"  # engines and gateways inherit it; Ray's own is 15
    )
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
