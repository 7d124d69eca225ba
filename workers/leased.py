"""A process that outlives its starter for a lease and can be adopted: the keeper's side of `workers.host`."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from workers import process_tree
from workers.command import Command
from workers.importable import with_our_packages

RECORD, LEASE, LOG = "engine.json", "lease", "log"
KEEP_LOGS_BELOW = 64 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """Written beside the lease; who finds it can adopt the process, if it is still that process."""

    pid: int
    started: float
    fingerprint: str
    epoch: int
    ports: tuple[int, ...]

    def write(self, file: Path) -> None:
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        os.replace(draft, file)

    @classmethod
    def read(cls, file: Path) -> "Record | None":
        try:
            content = json.loads(file.read_text())
            return cls(**{**content, "ports": tuple(content["ports"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None  # no record, or one of another version: nothing to adopt


class LeasedProcess:
    def __init__(self, directory: Path, record: Record, child: subprocess.Popen[bytes] | None = None) -> None:
        self.directory, self.record = directory, record
        self._child = child  # None when adopted

    @property
    def log(self) -> Path:
        return self.directory / LOG

    @classmethod
    def start(
        cls,
        directory: Path,
        command: Command,
        *,
        fingerprint: str,
        epoch: int,
        ports: Sequence[int],
        lease_s: float,
        grace_s: float,
    ) -> "LeasedProcess":
        directory.mkdir(parents=True, exist_ok=True)
        lease = directory / LEASE
        lease.touch()
        host = [sys.executable, "-m", "workers.host", "--lease", str(lease), "--lease-s", str(lease_s)]
        host += ["--grace-s", str(grace_s), "--", *command.argv]
        log = directory / LOG
        _rotate(log)
        with log.open("ab") as output:
            child = subprocess.Popen(
                host,
                env=with_our_packages(command.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=directory,
            )
        record = Record(child.pid, psutil.Process(child.pid).create_time(), fingerprint, epoch, tuple(ports))
        record.write(directory / RECORD)
        return cls(directory, record, child)

    @classmethod
    def adopt(cls, directory: Path, fingerprint: str, grace_s: float) -> "LeasedProcess | None":
        """The process that still runs there; one of another fingerprint is ended."""
        record = Record.read(directory / RECORD)
        if record is None or process_tree.find(record.pid, record.started) is None:
            if record is not None:
                LeasedProcess(directory, record).end(grace_s)
            return None
        process = cls(directory, record)
        if record.fingerprint != fingerprint:
            process.end(grace_s)
            return None
        process.renew()
        return process

    def renew(self) -> None:
        os.utime(self.directory / LEASE)

    def alive(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            return False
        return process_tree.find(self.record.pid, self.record.started) is not None

    def end(self, grace_s: float) -> bool:
        """End the host and everything under it; also what a killed host left in its session."""
        (self.directory / LEASE).unlink(missing_ok=True)
        host = process_tree.find(self.record.pid, self.record.started)
        members = process_tree.tree(host) if host else self._orphans()
        gone = process_tree.end(members, grace_s)
        if self._child is not None:
            self._child.poll()
        return gone

    def _orphans(self) -> list[psutil.Process]:
        """What a killed host left in its session. One led by a live process is somebody else's by now."""
        if process_tree.alive(self.record.pid):
            return []
        return list(process_tree.session(self.record.pid))


def last_epoch(directory: Path) -> int:
    record = Record.read(directory / RECORD)
    return record.epoch if record else 0


def _rotate(log: Path) -> None:
    if log.exists() and log.stat().st_size > KEEP_LOGS_BELOW:
        os.replace(log, log.with_suffix(".old"))
