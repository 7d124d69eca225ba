"""The Ray cluster of a fleet: start our own, or connect to the one the fleet file names."""

import logging
import os
import shutil
import sys
import time
from typing import Any

import grpc
import psutil

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec
from deploy.home import TOKEN, FleetHome, RunRecord, token
from deploy.ray.own_cluster import (
    LOOPBACK,
    OwnCluster,
    common_environment,
    namespace,
    own_cluster_environment,
    temporary_directory,
)
from workers import processes
from workers.engine_log import last_lines
from workers.processes import free_port

log = logging.getLogger("conserve.deploy.cluster")

AUTO = "auto"  # Ray finds it: on a node of the cluster
ANYBODY_MAY = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # where no token is asked for
START_LIMIT_S = 120.0
REACH_LIMIT_S = 5.0
LOGS = ("node.log", "head.log", "supervisor.log")


def start_own_cluster(fleet: FleetSpec, home: FleetHome, end_with_us: bool) -> RunRecord:
    """Start the supervisor of a cluster of our own. `end_with_us`: it ends when this process dies."""
    cluster = OwnCluster(fleet, home, free_port(LOOPBACK), free_port(LOOPBACK))
    for old in (home.ray / "gcs", temporary_directory(home)):
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
    """Ray, connected; imported only now, because it reads its settings from the environment then."""
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
        token(os.environ)  # or nothing that the fleet's processes say to each other would be secret
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if record.ray_address != AUTO:
            _until_listens(record.ray_address)
    host = record.ray_address.rpartition(":")[0]
    # Ray finds our address by itself, except where the head is on this machine only.
    ours = {"_node_ip_address": host} if host.startswith("127.") else {}
    try:
        ray.init(
            address=record.ray_address,
            namespace=namespace(fleet.name),
            log_to_driver=False,
            logging_level="WARNING",
            **ours,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LifecycleError(f"cannot connect to Ray at {record.ray_address}: {reason}") from error
    return ray


def refuse_open_cluster(ray: Any) -> None:
    """Who is in a Ray cluster runs code on all its nodes: one that answers without a token is no place for
    a fleet. What else this call ends with (a Ray that has it no more, say) is no sign of that."""
    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ANYBODY_MAY)(b"", timeout=REACH_LIMIT_S)
        except grpc.RpcError as refused:
            if refused.code() is not grpc.StatusCode.UNAUTHENTICATED:
                log.warning("not known whether Ray at %s asks for its token: %s", address, refused.code())
            return
    raise LifecycleError(
        f"Ray at {address} answers whoever reaches it, and who is in its cluster runs code on every node: "
        "end it, `ray get-auth-token --generate`, give each node that token (~/.ray/auth_token), and start "
        "Ray with RAY_AUTH_MODE=token, as deploy/ray/ and deploy/kubernetes/ do"
    )


def _until_listens(ray_address: str) -> None:
    """Ray itself would try for minutes, and say so in its own words."""
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
    """`ray start --block` says so in its log, which a new supervisor begins anew."""
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
