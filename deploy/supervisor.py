"""python -m deploy.supervisor: keep this machine's Ray head and node running until told to end.

It starts a process that has ended again, each time after a longer pause. Ray then restarts its actors, and
keepers adopt their engines. Engines and gateways serve meanwhile, because their leases run as long as the
supervisor lives (`workers.host`).
"""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.fleet import load_fleet
from deploy.home import FleetHome
from deploy.ray.cluster import (
    LOOPBACK,
    OwnCluster,
    head_environment,
    own_cluster_environment,
    temporary_directory,
)
from router.process import log_to_stderr
from workers import processes
from workers.host import SUPERVISOR
from workers.keeper.process_lease import recorded_below
from workers.processes import Backoff

log = logging.getLogger("conserve.deploy.supervisor")

POLL_S = 0.5
GRACE_S = 10.0
HEAD_GRACE_S = 2.0  # Ray's head takes over ten seconds to end when asked; its tables are on disk


@dataclass
class Child:
    """A command in its own session, so that all of its processes can be found and ended."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    stale: Path | None = None  # a file of the last run that would keep it from starting
    needs: tuple[str, int] | None = None  # an address that must listen before it starts
    grace_s: float = GRACE_S
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 30.0, 120.0))
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0

    def look(self, now: float) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                return
            log.warning("process ended process=%s code=%s", self.name, self.process.returncode)
            self.end()
            self.start_at = now + self.backoff.next(now)
        if now >= self.start_at and (self.needs is None or processes.listens(*self.needs)):
            self.start(now)

    def start(self, now: float) -> None:
        if self.stale is not None:
            self.stale.unlink(missing_ok=True)
        self.process = processes.start(self.argv, self.env, self.log)
        self.backoff.serving(now)
        log.info("process started process=%s pid=%d", self.name, self.process.pid)

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            members = list(processes.session(process.pid))
            with contextlib.suppress(psutil.Error):
                members += processes.tree(psutil.Process(process.pid))
            processes.end(members, self.grace_s)
            process.poll()


def supervise(children: Sequence[Child], end_with: psutil.Process | None) -> None:
    """Keep `children` running until SIGTERM, SIGINT or the end of `end_with`; then end them, last first."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        while not asked and (end_with is None or end_with.is_running()):
            for child in children:
                child.look(time.monotonic())
            time.sleep(POLL_S)
        log.info("ending reason=%s", "asked to" if asked else "its process is gone")
    finally:
        for child in reversed(children):
            child.end()


def own_cluster_children(cluster: OwnCluster) -> list[Child]:
    home, address = cluster.home, (LOOPBACK, cluster.port)
    # Ray takes the surviving node for a running head when this file names the same address.
    current = temporary_directory(home) / "ray_current_cluster"
    ours = {SUPERVISOR: f"{os.getpid()} {psutil.Process().create_time()}"}
    node_env = own_cluster_environment(home, os.environ) | ours
    head_env = head_environment(home, os.environ)
    return [
        Child("head", cluster.head_argv(), head_env, home.ray / "head.log", current, grace_s=HEAD_GRACE_S),
        Child("node", cluster.node_argv(), node_env, home.ray / "node.log", needs=address),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.supervisor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the fleet's directory, with its file")
    parser.add_argument("--port", type=int, required=True, help="port of Ray's head")
    parser.add_argument("--client-port", type=int, required=True, help="port of its server for Ray clients")
    parser.add_argument("--end-with", type=int, help="pid of a process; the fleet ends with it")
    arguments = parser.parse_args()
    log_to_stderr()
    home = FleetHome(arguments.home)
    cluster = OwnCluster(load_fleet(home.fleet_file), home, arguments.port, arguments.client_port)
    end_with = psutil.Process(arguments.end_with) if arguments.end_with else None
    supervise(own_cluster_children(cluster), end_with)
    for process in recorded_below(home.engines, home.gateways, home.directory):
        process.expire()  # it ends now, and not when it has missed us for a lease
    return 0


if __name__ == "__main__":
    sys.exit(main())
