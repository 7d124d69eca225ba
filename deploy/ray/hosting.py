"""Hosts processes that outlive their actor: a restarted actor adopts them."""

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from deploy.ray.cluster import common_environment
from workers import processes
from workers.keeper.launch import FLEET_MARK, ProcessCommand
from workers.keeper.process_lease import LeasedProcess
from workers.oom_score import OomScore
from workers.processes import Backoff

log = logging.getLogger("conserve.deploy.hosting")

LOOK_EVERY_S = 0.5
FIRST_BACKOFF_S, LONGEST_BACKOFF_S, CALM_S = 0.05, 10.0, 60.0
LEASE_S = 60.0  # on a Ray cluster that is not ours; a restart of the actor may take as long
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class HostedProcess:
    """A process to run: its Python module, its configuration and its folder."""

    name: str
    module: str
    config: bytes  # holds keys; a process with another configuration is not adopted
    directory: Path
    port: int
    mark: str  # mark of the fleet's processes
    grace_s: float = GRACE_S
    oom_score: OomScore = OomScore.SERVING

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.config)

    def start(self) -> LeasedProcess:
        file = self.directory / "config.json"
        processes.write_atomically(file, self.config, 0o600)
        env = {**common_environment(os.environ), FLEET_MARK: self.mark}
        started = LeasedProcess.start(
            self.directory,
            ProcessCommand((sys.executable, "-m", self.module, "--config", str(file)), env),
            fingerprint=self.fingerprint,
            epoch=0,
            ports=(self.port,),
            lease_s=LEASE_S,
            grace_s=self.grace_s,
            oom_score=self.oom_score,
            restart=True,
        )
        log.info("process started name=%s pid=%d", self.name, started.record.pid)
        return started


async def keep(
    wanted: HostedProcess,
    look: Callable[[LeasedProcess], Awaitable[None]],
    ended: Callable[[], None] = lambda: None,
) -> None:
    """Adopt or start a process under `workers.host`, renew its lease, and restart both when the host ends.

    This never returns. It calls `look` every half second while `workers.host` runs, and `ended` each time
    that it has ended; `workers.host` itself restarts a process that was killed.
    """
    wanted.directory.mkdir(parents=True, exist_ok=True)
    loop, backoff = asyncio.get_running_loop(), Backoff(FIRST_BACKOFF_S, LONGEST_BACKOFF_S, CALM_S)
    process = await asyncio.to_thread(
        LeasedProcess.adopt, wanted.directory, wanted.fingerprint, wanted.grace_s
    )
    while True:
        process = process or wanted.start()
        backoff.serving(loop.time())
        while process.alive():
            process.renew()
            await look(process)
            await _ended_within(process.record.pid, LOOK_EVERY_S)
        await asyncio.to_thread(process.end, GRACE_S)
        ended()
        process = None
        wait_s = backoff.next(loop.time())
        log.warning("process ended name=%s next_start_s=%.2f", wanted.name, wait_s)
        await asyncio.sleep(wait_s)


async def _ended_within(pid: int, seconds: float) -> None:
    """Wait until process `pid` ends, but at most `seconds`. It need not be a child of ours."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), seconds)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def fingerprint(config: bytes) -> str:
    return hashlib.sha256(config).hexdigest()[:16]


def last_port(directory: Path, host: str) -> int:
    """Return the port that the folder's last process had, or a free port if another process has taken it."""
    last = LeasedProcess.recorded(directory)
    if last is not None and (last.alive() or not processes.listen_problem(host, last.record.ports[0])):
        return last.record.ports[0]
    return processes.free_port(host)


def end(directory: Path) -> None:
    """End the process that runs in a folder, if there is one."""
    process = LeasedProcess.recorded(directory)
    if process is not None:
        process.end(GRACE_S)
