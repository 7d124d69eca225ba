"""Processes that outlive their starter for a lease and can be adopted: the keeper's side of `workers.host`.

Start slots limit how many engines of a host start at the same time. A start uses all cores, so that many
together would be slow and seem to fail.
"""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from workers import processes
from workers.engine_memory import session_bytes
from workers.host import ASKED_TO_END
from workers.keeper.launch import ProcessCommand
from workers.oom_score import OomScore

RECORD, LEASE, LOG, IDLE = "engine.json", "lease", "log", "idle_bytes"
KEEP_LOGS_BELOW = 64 << 20
LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """Record next to the lease, by which a keeper finds the process and decides whether to adopt it."""

    pid: int
    started: float
    fingerprint: str
    epoch: int
    ports: tuple[int, ...]

    def write(self, file: Path) -> None:
        processes.write_atomically(file, json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> "ProcessRecord | None":
        try:
            content = json.loads(file.read_text())
            return cls(**{**content, "ports": tuple(content["ports"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None  # there is no record, or it is of another version


class LeasedProcess:
    """Process that runs under `workers.host`, and that this process started or adopted."""

    def __init__(
        self, directory: Path, record: ProcessRecord, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.directory, self.record = directory, record
        self._child = child  # None if the process was adopted

    @property
    def log(self) -> Path:
        return self.directory / LOG

    @classmethod
    def start(
        cls,
        directory: Path,
        command: ProcessCommand,
        *,
        fingerprint: str,
        epoch: int,
        ports: Sequence[int],
        lease_s: float,
        grace_s: float,
        oom_score: OomScore,
        leave_s: float = 0.0,
        restart: bool = False,
    ) -> "LeasedProcess":
        """Start a process, which `workers.host` starts again if `restart` is set and a signal kills it.

        With `leave_s`, its first SIGTERM is only a request to end (`asked_to_end`).
        """
        directory.mkdir(parents=True, exist_ok=True)
        lease = directory / LEASE
        lease.touch()
        (directory / IDLE).unlink(missing_ok=True)
        host = [sys.executable, "-m", "workers.host", "--lease", str(lease), "--lease-s", str(lease_s)]
        host += ["--record", str(directory / RECORD), "--oom-score", str(int(oom_score))]
        host += ["--grace-s", str(grace_s), "--leave-s", str(leave_s)]
        host += [*(["--restart"] if restart else []), "--", *command.argv]
        log = directory / LOG
        _rotate(log)
        child = processes.start(host, processes.with_our_packages(command.env), log, directory)
        started = psutil.Process(child.pid).create_time()
        record = ProcessRecord(child.pid, started, fingerprint, epoch, tuple(ports))
        record.write(directory / RECORD)
        return cls(directory, record, child)

    @classmethod
    def recorded(cls, directory: Path) -> "LeasedProcess | None":
        """Return the process that was last started in the directory, whether or not it still runs."""
        record = ProcessRecord.read(directory / RECORD)
        return cls(directory, record) if record is not None else None

    @classmethod
    def adopt(cls, directory: Path, fingerprint: str, grace_s: float) -> "LeasedProcess | None":
        """Return the directory's process if it runs with this fingerprint; end any other process of it."""
        process = cls.recorded(directory)
        if process is None:
            return None
        if not process.alive() or process.record.fingerprint != fingerprint:
            process.end(grace_s)
            return None
        process.renew()
        return process

    def expire(self) -> None:
        """Remove the lease, so that `workers.host` ends the process by itself."""
        (self.directory / LEASE).unlink(missing_ok=True)

    def renew(self) -> None:
        """Renew the lease, unless the process is being ended."""
        with suppress(FileNotFoundError):
            os.utime(self.directory / LEASE)

    def alive(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            return False
        return processes.find(self.record.pid, self.record.started) is not None

    def asked_to_end(self) -> bool:
        """Return whether a signal asked the process to end."""
        return (self.directory / ASKED_TO_END).exists()

    def memory_bytes(self, enough: int = 0) -> int:
        """Return the memory of the whole process tree, or an upper bound that is at most `enough`."""
        return session_bytes(self.record.pid, enough)

    def idle_bytes(self) -> int:
        """Return the memory that the process tree had at the first call since its start, by any keeper."""
        file = self.directory / IDLE
        try:
            return int(file.read_text())
        except (OSError, ValueError):
            idle = self.memory_bytes()
            processes.write_atomically(file, str(idle))
            return idle

    def end(self, grace_s: float) -> bool:
        """End `workers.host` and all processes under it; if it was killed, those left in its Unix session."""
        self.expire()
        host = processes.find(self.record.pid, self.record.started)
        members = processes.tree(host) if host else self._orphans()
        gone = processes.end(members, grace_s)
        if self._child is not None:
            self._child.poll()
        return gone

    def _orphans(self) -> list[psutil.Process]:
        """Return what a killed `workers.host` left in its Unix session, nothing if its pid was reused."""
        if processes.alive(self.record.pid):
            return []
        return list(processes.session(self.record.pid))


def recorded_below(*folders: Path) -> list[LeasedProcess]:
    """Return the last process started in each of the folders and their subfolders, running or not."""
    directories = [directory for folder in folders for directory in (folder, *folder.glob("*/"))]
    return [process for process in map(LeasedProcess.recorded, directories) if process is not None]


def last_epoch(directory: Path) -> int:
    record = ProcessRecord.read(directory / RECORD)
    return record.epoch if record else 0


def _rotate(log: Path) -> None:
    if log.exists() and log.stat().st_size > KEEP_LOGS_BELOW:
        os.replace(log, log.with_suffix(".old"))


@asynccontextmanager
async def start_slot(directory: Path, slots: int | None) -> AsyncIterator[None]:
    """Wait for one of `slots` file locks in `directory`, and hold it; the lock of a dead holder is free.

    Without `slots` nothing limits starts.
    """
    if slots is None:
        yield
        return
    held = await _acquire(directory, slots)
    try:
        yield
    finally:
        os.close(held)


async def _acquire(directory: Path, slots: int) -> int:
    while True:
        for number in range(slots):
            file = os.open(directory / f"start-{number}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                return file
        await asyncio.sleep(LOOK_EVERY_S)
