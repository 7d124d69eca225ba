"""Power limits: what would change, setting it, and setting it back, with a record on disk of what was before.

An entry is written before a limit is set and removed after it is set back, each time to the disk itself:
whoever comes next can always undo it. Limits do not outlive a reboot, and so neither does the record.
"""

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.power.nvml import Gpu, Gpus, NoGpus, NotPermitted, PowerError
from workers.processes import write_atomically

log = logging.getLogger("conserve.workers.power")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_W = 0.5  # limits are kept in milliwatts, some boards round to whole watts


@dataclass(frozen=True, slots=True)
class LimitEntry:
    uuid: str
    original_w: float
    cap_w: float
    owner: str  # the engine or the person it was changed for
    holder: str  # the process that answers for setting it back; another takes over by writing its own name


LimitRecord = dict[str, LimitEntry]  # by UUID


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def read_record(path: Path, boot: str) -> LimitRecord:
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
    return {entry["uuid"]: LimitEntry(**entry) for entry in row["entries"]}


@contextmanager
def locked_record(path: Path, boot: str) -> Iterator["RecordChanges"]:
    """The record, for one process at a time; others on this machine wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield RecordChanges(path, boot, read_record(path, boot))


class RecordChanges:
    """Entries under the lock. Each change is on the disk when the call returns."""

    def __init__(self, path: Path, boot: str, entries: LimitRecord) -> None:
        self._path, self._boot = path, boot
        self.entries = entries

    def put(self, entry: LimitEntry) -> None:
        self.entries = {**self.entries, entry.uuid: entry}
        self._write()

    def remove(self, uuid: str) -> None:
        self.entries = {known: entry for known, entry in self.entries.items() if known != uuid}
        self._write()

    def _write(self) -> None:
        row = {"boot": self._boot, "entries": [asdict(entry) for entry in self.entries.values()]}
        write_atomically(self._path, json.dumps(row))


@dataclass(frozen=True, slots=True)
class WantedLimit:
    """A limit for one GPU, by index or UUID."""

    gpu: str
    cap_w: float
    owner: str


@dataclass(frozen=True, slots=True)
class LimitChange:
    gpu: Gpu | None
    wish: WantedLimit
    original_w: float  # what it is to be set back to
    problem: str = ""  # why it will not be done

    @property
    def needed(self) -> bool:
        return not self.problem and self.gpu is not None and not same(self.gpu.limit_w, self.wish.cap_w)


def same(one_w: float, other_w: float) -> bool:
    return abs(one_w - other_w) < SAME_W


def plan(wishes: Sequence[WantedLimit], found: Mapping[str, Gpu], record: LimitRecord) -> list[LimitChange]:
    """`found`: the GPUs of the wishes that exist, by the name they were wished for."""
    seen: dict[str, WantedLimit] = {}
    changes = []
    for wish in wishes:
        gpu = found.get(wish.gpu)
        if gpu is None:
            changes.append(LimitChange(None, wish, 0.0, f"this machine has no GPU {wish.gpu}"))
            continue
        entry = record.get(gpu.uuid)
        original = entry.original_w if entry else gpu.limit_w
        changes.append(LimitChange(gpu, wish, original, _problem(gpu, wish, seen.get(gpu.uuid))))
        seen.setdefault(gpu.uuid, wish)
    return changes


def _problem(gpu: Gpu, wish: WantedLimit, other: WantedLimit | None) -> str:
    if other is not None and not same(other.cap_w, wish.cap_w):
        return f"{other.owner} wants {other.cap_w:g} W of the same GPU"
    if not gpu.least_w <= wish.cap_w <= gpu.most_w:
        return f"{wish.cap_w:g} W is outside of {gpu.least_w:g} to {gpu.most_w:g} W, which this GPU takes"
    return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    gpu: str  # "0 (NVIDIA A40)", or the name that was asked for
    owner: str
    done: bool
    text: str


def look(gpus: Gpus, wishes: Sequence[WantedLimit], path: Path, boot: str) -> list[LimitChange]:
    """The dry run."""
    return plan(wishes, _found(gpus, wishes), read_record(path, boot))


def apply(gpus: Gpus, wishes: Sequence[WantedLimit], path: Path, boot: str, holder: str) -> list[Outcome]:
    with locked_record(path, boot) as changes:
        planned = plan(wishes, _found(gpus, wishes), changes.entries)
        return [_apply_one(gpus, change, changes, holder) for change in planned]


def _found(gpus: Gpus, wishes: Sequence[WantedLimit]) -> dict[str, Gpu]:
    found: dict[str, Gpu] = {}
    for wish in wishes:
        try:
            found[wish.gpu] = gpus.find(wish.gpu)
        except NoGpus as error:
            log.warning("%s", error)
    return found


def _apply_one(gpus: Gpus, change: LimitChange, changes: RecordChanges, holder: str) -> Outcome:
    wish, gpu = change.wish, change.gpu
    if change.problem or gpu is None:
        return Outcome(_name(gpu, wish), wish.owner, False, change.problem)
    before = changes.entries.get(gpu.uuid)
    if before is None and not change.needed:
        return Outcome(
            _name(gpu, wish), wish.owner, True, f"is at {wish.cap_w:g} W already; nothing to set back"
        )
    changes.put(LimitEntry(gpu.uuid, change.original_w, wish.cap_w, wish.owner, holder))
    try:
        gpus.set_limit(gpu.uuid, wish.cap_w)
        now = gpus.find(gpu.uuid).limit_w
    except PowerError as error:
        if before is None and isinstance(error, NotPermitted):
            changes.remove(gpu.uuid)  # nothing was changed: nothing to set back
        return Outcome(_name(gpu, wish), wish.owner, False, str(error))
    if not same(now, wish.cap_w):
        return Outcome(_name(gpu, wish), wish.owner, False, f"set to {wish.cap_w:g} W, but it says {now:g} W")
    return Outcome(_name(gpu, wish), wish.owner, True, f"{change.original_w:g} W -> {now:g} W")


def restore(
    gpus: Gpus,
    path: Path,
    boot: str,
    owner: str | None = None,
    holder: str | None = None,
    uuids: frozenset[str] | None = None,
) -> list[Outcome]:
    """Set back what the record has: all of it, one owner's, one holder's, or of some GPUs."""
    with locked_record(path, boot) as changes:
        chosen = [
            entry
            for entry in changes.entries.values()
            if owner in (None, entry.owner)
            and holder in (None, entry.holder)
            and (uuids is None or entry.uuid in uuids)
        ]
        return [_restore_one(gpus, entry, changes) for entry in chosen]


def _restore_one(gpus: Gpus, entry: LimitEntry, changes: RecordChanges) -> Outcome:
    try:
        gpu = gpus.find(entry.uuid)
        if not same(gpu.limit_w, entry.cap_w) and not same(gpu.limit_w, entry.original_w):
            changes.remove(entry.uuid)
            text = (
                f"is at {gpu.limit_w:g} W, set by somebody since; left so (before us: {entry.original_w:g} W)"
            )
            return Outcome(_name(gpu, None), entry.owner, False, text)
        gpus.set_limit(entry.uuid, entry.original_w)
    except PowerError as error:
        return Outcome(
            entry.uuid, entry.owner, False, f"{error}; still to be set back to {entry.original_w:g} W"
        )
    changes.remove(entry.uuid)
    return Outcome(_name(gpu, None), entry.owner, True, f"{gpu.limit_w:g} W -> {entry.original_w:g} W")


def _name(gpu: Gpu | None, wish: WantedLimit | None) -> str:
    if gpu is not None:
        return f"{gpu.index} ({gpu.name})"
    return wish.gpu if wish is not None else ""
