"""python -m deploy.supervisor: keep this machine's Ray head and node running until asked to end.

What ends is started again with a back-off; Ray then restarts its actors, and keepers adopt their engines.
"""

import argparse
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.home import FleetHome
from deploy.ray.own_cluster import OwnCluster, head_environment, own_cluster_environment
from router.logs import log_to_stderr
from workers import processes
from workers.processes import Backoff

log = logging.getLogger("conserve.deploy.supervisor")

LOOK_EVERY_S = 0.5
GRACE_S = 10.0
HEAD_GRACE_S = 2.0  # asked to, it does not end within ten seconds; its tables are on disk


@dataclass
class Child:
    """A command in a session of its own, so that what it starts can be found and ended with it."""

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
        if now >= self.start_at and (self.needs is None or listens(*self.needs)):
            self.start(now)

    def start(self, now: float) -> None:
        if self.stale is not None:
            self.stale.unlink(missing_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.argv,
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.backoff.serving(now)
        log.info("process started process=%s pid=%d", self.name, self.process.pid)

    def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        members = list(processes.session(process.pid))
        with contextlib.suppress(psutil.Error):
            members += processes.tree(psutil.Process(process.pid))
        processes.end(members, self.grace_s)
        process.poll()


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def supervise(children: Sequence[Child], end_with: psutil.Process | None) -> None:
    """Until SIGTERM or SIGINT, or until `end_with` is gone; ends the children in reverse order."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        while not asked and (end_with is None or end_with.is_running()):
            for child in children:
                child.look(time.monotonic())
            time.sleep(LOOK_EVERY_S)
        log.info("ending reason=%s", "asked to" if asked else "its process is gone")
    finally:
        for child in reversed(children):
            child.end()


def own_cluster_children(home: FleetHome, cluster: OwnCluster) -> list[Child]:
    host, port = cluster.address.rsplit(":", 1)
    node_env = own_cluster_environment(home, os.environ)
    # Ray takes the surviving node for a running head when this file names the same address.
    current = cluster.temporary / "ray_current_cluster"
    head_env = head_environment(home, os.environ)
    return [
        Child("head", cluster.head_argv(), head_env, home.ray / "head.log", current, grace_s=HEAD_GRACE_S),
        Child("node", cluster.node_argv(), node_env, home.ray / "node.log", needs=(host, int(port))),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.supervisor", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="the fleet's directory")
    parser.add_argument("--cluster", type=json.loads, required=True, help="an OwnCluster as JSON")
    parser.add_argument("--end-with", type=int, help="pid of a process without which to bring the fleet down")
    arguments = parser.parse_args()
    log_to_stderr()
    cluster = OwnCluster(**{**arguments.cluster, "temporary": Path(arguments.cluster["temporary"])})
    home = FleetHome(arguments.home)
    end_with = psutil.Process(arguments.end_with) if arguments.end_with else None
    supervise(own_cluster_children(home, cluster), end_with)
    return 0


if __name__ == "__main__":
    sys.exit(main())
