"""The Ray cluster of a fleet: start our own, or connect to the one the fleet file names."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import psutil

from deploy.errors import LifecycleError
from deploy.fleet import FleetSpec
from deploy.home import FleetHome, RunRecord
from deploy.ray.own_cluster import (
    LOOPBACK,
    OwnCluster,
    common_environment,
    namespace,
    own_cluster_environment,
)
from workers import engine_log, processes
from workers.processes import free_port

START_LIMIT_S = 120.0
REACH_LIMIT_S = 5.0


def start_own_cluster(fleet: FleetSpec, home: FleetHome, end_with_us: bool) -> RunRecord:
    """Start the supervisor of a cluster of our own. `end_with_us`: it ends when this process dies."""
    cluster = OwnCluster.of(fleet, home, free_port(LOOPBACK), free_port(LOOPBACK))
    for old in (home.ray / "gcs", cluster.temporary):
        shutil.rmtree(old, ignore_errors=True)
    for name in ("node.log", "head.log", "supervisor.log"):
        (home.ray / name).unlink(missing_ok=True)
    text = json.dumps({**asdict(cluster), "temporary": str(cluster.temporary)})
    argv = [sys.executable, "-m", "deploy.supervisor", "--home", str(home.root), "--cluster", text]
    if end_with_us:
        argv += ["--end-with", str(os.getpid())]
    with (home.ray / "supervisor.log").open("ab") as output:
        supervisor = subprocess.Popen(
            argv,
            env=own_cluster_environment(home, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = psutil.Process(supervisor.pid).create_time()
    record = RunRecord(supervisor.pid, started, cluster.address)
    home.write_run(record)
    return record


def connect(fleet: FleetSpec, home: FleetHome, record: RunRecord) -> Any:
    """Ray, connected; imported only now, because it reads its settings from the environment then."""
    settings = _environment(fleet, home)
    changed = any(
        os.environ.get(name) != value for name, value in settings.items() if name.startswith("RAY_")
    )
    if changed and "ray" in sys.modules:
        raise LifecycleError("Ray was imported before the fleet's settings for it; use a process of its own")
    os.environ.update(settings)
    import ray

    own = fleet.ray.address is None
    deadline = time.monotonic() + START_LIMIT_S
    while own and not _node_is_up(home):
        if processes.find(record.pid, record.started) is None:
            raise LifecycleError(f"Ray did not start: {_last_words(home)}")
        if time.monotonic() > deadline:
            raise LifecycleError(f"Ray did not start within {START_LIMIT_S:.0f} s: {_last_words(home)}")
        time.sleep(0.3)
    if not own:
        _until_listens(record.ray_address)
    try:
        ray.init(
            address=record.ray_address,
            namespace=namespace(fleet.name),
            log_to_driver=False,
            logging_level="WARNING",
            **_our_address(record.ray_address),
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LifecycleError(f"cannot connect to Ray at {record.ray_address}: {reason}") from error
    return ray


def _until_listens(ray_address: str) -> None:
    """Ray itself would try for minutes, and say so in its own words."""
    host, _, port = ray_address.rpartition(":")
    deadline = time.monotonic() + REACH_LIMIT_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=REACH_LIMIT_S).close()
            return
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline or isinstance(error, ValueError):
                raise LifecycleError(
                    f"no Ray cluster answers at {ray_address} ({error}); start Ray there first "
                    "(deploy/ray/), or correct ray.address, or leave it out: a cluster of this machine alone"
                ) from error
        time.sleep(0.5)


def _our_address(ray_address: str) -> dict[str, str]:
    """Ray finds out by itself, except where the head is on this machine only."""
    host = ray_address.rsplit(":", 1)[0]
    return {"_node_ip_address": host} if host.startswith("127.") else {}


def _environment(fleet: FleetSpec, home: FleetHome) -> dict[str, str]:
    if fleet.ray.address is None:
        return own_cluster_environment(home, os.environ)
    return common_environment(os.environ)


def _node_is_up(home: FleetHome) -> bool:
    """`ray start --block` says so in its log, which a new supervisor begins anew."""
    return any("Ray runtime started" in line for line in engine_log.last_lines(home.ray / "node.log", 200))


def _last_words(home: FleetHome) -> str:
    for name in ("node.log", "head.log", "supervisor.log"):
        lines = engine_log.last_lines(home.ray / name, 3)
        if lines:
            return " / ".join(lines) + f" (see {home.ray / name})"
    return f"no log in {home.ray}"
