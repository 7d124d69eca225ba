"""Ray cluster of a fleet: our own on this machine, or the one that the fleet file names.

Our own cluster has a head, which only keeps tables, and a node beside it, on which the fleet runs, because
a node inside the head would be lost with it. The fleet runs on without the head for up to ten minutes. The
cluster requires a token.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec
from deploy.home import LONGEST_SOCKET_PATH, TOKEN, FleetHome, RunRecord, token
from workers import processes
from workers.keeper.engine_log import last_lines
from workers.keeper.launch import FLEET_MARK
from workers.processes import free_port, with_our_packages

log = logging.getLogger("conserve.deploy.cluster")

CONTROL = "conserve_control"  # the resource that places the directory and the gateways
PLENTY = 10_000.0
HEAD_LOSS_BRIDGED_S = 600
LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store.1"
# Not 127.0.0.1, which Ray replaces by the machine's address: that changes when a laptop changes networks.
LOOPBACK = "127.0.0.2"
OBJECT_STORE_BYTES = 100 << 20  # we store nothing there, but Ray wants at least 80 MB


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
            "--no-monitor",  # no autoscaler of Ray's, because this cluster is one machine
        )

    def node_argv(self) -> list[str]:
        return self._start("--address", self.address, "--resources", json.dumps(resources_of(self.fleet)))

    def _start(self, *options: str) -> list[str]:
        return [
            *(*ray_command(), "start", "--block", *options),
            *("--node-ip-address", LOOPBACK, "--disable-usage-stats", "--include-log-monitor", "false"),
            *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        ]


def temporary_directory(home: FleetHome) -> Path:
    """Return the directory of Ray's sockets and logs; its path is short, as paths of sockets must be."""
    digest = hashlib.sha256(str(home.root).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"conserve-{os.getuid()}" / digest


def make_temporary_directory(home: FleetHome) -> None:
    """Make Ray's directory anew inside a private one, because Ray lets everybody write to its directory."""
    made = temporary_directory(home)
    if len(str(made / LONGEST_SOCKET)) > LONGEST_SOCKET_PATH:
        raise LifecycleError(f"{made} is too long for Ray's sockets; set TMPDIR to a shorter path")
    private = made.parent
    with contextlib.suppress(FileExistsError):
        private.mkdir(mode=0o700)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise LifecycleError(
            f"{private} is another user's, who could read and replace Ray's sockets there; "
            "have it removed, or set TMPDIR to a directory of your own"
        )
    private.chmod(0o700)
    remove_temporary_directory(home)
    private.mkdir(mode=0o700, exist_ok=True)
    made.mkdir()


def remove_temporary_directory(home: FleetHome) -> None:
    made = temporary_directory(home)
    shutil.rmtree(made, ignore_errors=True)
    with contextlib.suppress(OSError):  # other fleets of this user are in it
        made.parent.rmdir()


def resources_of(fleet: FleetSpec) -> dict[str, float]:
    """Return the custom resources of our own node: more than enough of each that a tier asks for.

    Ray finds CPUs and GPUs by itself.
    """
    names = {CONTROL, *fleet.ray.control_resources}
    for tier in fleet.tiers:
        names |= tier.resources.keys() - {"CPU", "GPU", "memory"}
    return dict.fromkeys(sorted(names), PLENTY)


def namespace(fleet: str) -> str:
    return f"conserve-{fleet}"


def common_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the settings that Ray reads at import, for every process that uses Ray."""
    ours = with_our_packages(environ)
    env = {name: value for name, value in ours.items() if not name.startswith("RAY_")}
    env["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(HEAD_LOSS_BRIDGED_S)
    env["RAY_DEDUP_LOGS"] = "0"
    env["RAY_raylet_start_wait_time_s"] = "120"  # a busy machine takes more than Ray's 30
    env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    env["RAY_worker_niceness"] = "0"  # engines and gateways inherit it; Ray's own is 15
    # Ray would end actors, not the engines that took the memory; the kernel goes by `workers.oom_score`.
    env["RAY_memory_monitor_refresh_ms"] = "0"
    env["RAY_worker_oom_score_adj"] = "0"
    return env


def own_cluster_environment(home: FleetHome, environ: Mapping[str, str]) -> dict[str, str]:
    env = common_environment(environ)
    env[FLEET_MARK] = home.mark
    env["RAY_AUTH_MODE"] = "token"
    env["RAY_AUTH_TOKEN_PATH"] = str(home.ray_token())
    return env


def head_environment(home: FleetHome, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Ray's head, with which it keeps its tables on disk to survive a restart."""
    env = own_cluster_environment(home, environ)
    env["RAY_gcs_storage"] = "rocksdb"
    env["RAY_gcs_storage_path"] = str(home.ray / "gcs")
    return env


def ray_command() -> list[str]:
    return [sys.executable, "-m", "ray.scripts.scripts"]


AUTO = "auto"  # on a node of a cluster, Ray finds the address by itself
ANYBODY_MAY = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a cluster without tokens answers it to anybody
START_LIMIT_S = 120.0
REACH_LIMIT_S = 5.0
LOGS = ("node.log", "head.log", "supervisor.log")


def start_own_cluster(fleet: FleetSpec, home: FleetHome, end_with_us: bool) -> RunRecord:
    """Start our own cluster's supervisor and return its record; `end_with_us` ends it with this process."""
    cluster = OwnCluster(fleet, home, free_port(LOOPBACK), free_port(LOOPBACK))
    make_temporary_directory(home)
    for old in (home.ray / "gcs", home.ray / "logs"):
        shutil.rmtree(old, ignore_errors=True)
    for name in LOGS:
        (home.ray / name).unlink(missing_ok=True)
    argv = [sys.executable, "-m", "deploy.supervisor", "--home", str(home.root)]
    argv += ["--port", str(cluster.port), "--client-port", str(cluster.client_port)]
    if end_with_us:
        argv += ["--end-with", str(os.getpid())]
    environment = own_cluster_environment(home, os.environ)
    supervisor = processes.start(argv, environment, home.ray / "supervisor.log")
    started = psutil.Process(supervisor.pid).create_time()
    record = RunRecord(supervisor.pid, started, cluster.address)
    home.write_run(record)
    return record


def connect(fleet: FleetSpec, home: FleetHome, record: RunRecord) -> Any:
    """Set Ray's environment, import Ray, connect it to the fleet's cluster, and return the module."""
    own = fleet.ray.address is None
    settings = own_cluster_environment(home, os.environ) if own else common_environment(os.environ)
    changed = any(
        os.environ.get(name) != value for name, value in settings.items() if name.startswith("RAY_")
    )
    if changed and "ray" in sys.modules:
        raise LifecycleError("Ray was imported before the fleet's settings for it; use a process of its own")
    os.environ.update(settings)
    if own:
        os.environ.pop(TOKEN, None)  # another cluster's: Ray would take it before our file
    import ray

    if own:
        _until_node_is_up(home, record)
    else:
        token(os.environ)  # raises if there is none, because the keys of the fleet's processes come from it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if record.ray_address != AUTO:
            _until_listens(record.ray_address)
    host = record.ray_address.rpartition(":")[0]
    # Ray finds our address by itself, except where the head is on this machine only.
    ours = {"_node_ip_address": host} if host.startswith("127.") else {}
    handled = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        ray.init(
            address=record.ray_address,
            namespace=namespace(fleet.name),
            log_to_driver=False,
            logging_level="WARNING",
            **ours,
        )
        with contextlib.suppress(ValueError):  # signals arrive in the main thread only
            for number, handler in handled.items():  # Ray's handlers would end us with a dump of the stack
                signal.signal(number, handler)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LifecycleError(f"cannot connect to Ray at {record.ray_address}: {reason}") from error
    return ray


def refuse_open_cluster(ray: Any) -> None:
    """Refuse a cluster that answers without a token: anybody could run code on all of its nodes.

    If the call fails for another reason, such as a Ray version without it, the error is only logged.
    """
    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ANYBODY_MAY)(b"", timeout=REACH_LIMIT_S)
        except grpc.RpcError as refused:
            if refused.code() is not grpc.StatusCode.UNAUTHENTICATED:
                log.warning("not known whether Ray at %s asks for its token: %s", address, refused.code())
            return
    raise LifecycleError(
        f"Ray at {address} asks for no token, and everybody in its cluster can run code on every node: "
        "end it, `ray get-auth-token --generate`, give each node that token (~/.ray/auth_token), and start "
        "Ray with RAY_AUTH_MODE=token, as deploy/ray/ and deploy/kubernetes/ do"
    )


def _until_listens(ray_address: str) -> None:
    """Wait until Ray's head listens. Connecting earlier would let Ray retry for minutes."""
    host, _, port = ray_address.rpartition(":")
    deadline = time.monotonic() + REACH_LIMIT_S
    while not (port.isdigit() and processes.listens(host, int(port))):
        if time.monotonic() > deadline or not port.isdigit():
            raise LifecycleError(
                f"no Ray cluster answers at {ray_address}; start Ray there first (deploy/ray/), "
                "or correct ray.address, or leave it out: a cluster of this machine alone"
            )
        time.sleep(0.5)


def _until_node_is_up(home: FleetHome, record: RunRecord) -> None:
    """Wait until our Ray node is up, by the log of `ray start --block`; each supervisor begins a new log."""
    deadline = time.monotonic() + START_LIMIT_S
    while not any("Ray runtime started" in line for line in last_lines(home.ray / LOGS[0], 200)):
        if processes.find(record.pid, record.started) is None:
            raise LifecycleError(f"Ray did not start: {_last_words(home)}")
        if time.monotonic() > deadline:
            raise LifecycleError(f"Ray did not start within {START_LIMIT_S:.0f} s: {_last_words(home)}")
        time.sleep(0.3)


def _last_words(home: FleetHome) -> str:
    for name in LOGS:
        lines = last_lines(home.ray / name, 3)
        if lines:
            return " / ".join(lines) + f" (see {home.ray / name})"
    return f"no log in {home.ray}"
