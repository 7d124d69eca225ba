"""What limits GPUs had before we changed them, on disk before the change.

An entry is written before a limit is set and removed after it is set back, each time to the disk itself:
whoever comes next can always undo it. Limits do not outlive a reboot, and so neither does the record.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.power.nvml import PowerError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Entry:
    uuid: str
    original_w: float
    cap_w: float
    owner: str  # the engine or the person it was changed for
    holder: str  # the process that answers for setting it back; another takes over by writing its own name


Record = dict[str, Entry]  # by UUID


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def read(path: Path, boot: str) -> Record:
    try:
        row = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise PowerError(
            f"{path} is damaged ({error}); set limits back with nvidia-smi and remove it"
        ) from error
    if row["boot"] != boot:
        return {}
    return {entry["uuid"]: Entry(**entry) for entry in row["entries"]}


@contextmanager
def locked(path: Path, boot: str) -> Iterator["Changes"]:
    """The record, for one process at a time; others on this machine wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Changes(path, boot, read(path, boot))


class Changes:
    """Entries under the lock. Each change is on the disk when the call returns."""

    def __init__(self, path: Path, boot: str, entries: Record) -> None:
        self._path, self._boot = path, boot
        self.entries = entries

    def put(self, entry: Entry) -> None:
        self.entries = {**self.entries, entry.uuid: entry}
        self._write()

    def remove(self, uuid: str) -> None:
        self.entries = {known: entry for known, entry in self.entries.items() if known != uuid}
        self._write()

    def _write(self) -> None:
        row = {"boot": self._boot, "entries": [asdict(entry) for entry in self.entries.values()]}
        draft = self._path.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump(row, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
