"""Power limits: what would change, setting it, and setting it back, with a record on disk of what was before.

An entry is written before a limit is set and removed after it is set back, each time to the disk itself:
whoever comes next can always undo it. Limits do not outlive a reboot, and so neither does the record.

python -m workers.power.limits RECORD HOLDER GRACE_S: the *guard*, which sets limits back when their keeper is
gone. Its standard input is a pipe from the keeper. The end of it means that the keeper ended, however it
ended. After the grace it sets back what that keeper still answers for; a restarted one has put its own name
there. SIGTERM, as `conserve down` sends it to keeper and guard alike, means that nobody restarts it: no grace
then.
"""

import fcntl
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from workers.power.nvml import Gpu, Gpus, NoGpus, NotPermitted, PowerError
from workers.processes import WorkerError, write_atomically

log = logging.getLogger("conserve.workers.power")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAME_W = 0.5  # limits are kept in milliwatts, some boards round to whole watts
KEEPER_ENDS_S = 8.0  # less than what whoever ends the guard waits before it kills it


@dataclass(frozen=True, slots=True)
class LimitEntry:
    uuid: str
    original_w: float
    cap_w: float
    owner: str  # the engine or the person it was changed for
    holder: str  # the process that answers for setting it back; another takes over by writing its own name


@dataclass(slots=True)
class LimitRecord:
    """Under the lock, each change is on the disk when the call returns."""

    path: Path
    boot: str
    entries: dict[str, LimitEntry] = field(default_factory=dict)  # by UUID

    def put(self, entry: LimitEntry) -> None:
        self.entries[entry.uuid] = entry
        self._write()

    def remove(self, uuid: str) -> None:
        del self.entries[uuid]
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, msgspec.json.encode({"boot": self.boot, "entries": self.entries}))


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def read_record(path: Path, boot: str) -> LimitRecord:
    record = LimitRecord(path, boot)
    try:
        said = msgspec.json.decode(path.read_bytes())
        if said["boot"] == boot:
            record.entries = msgspec.convert(said["entries"], dict[str, LimitEntry])
    except FileNotFoundError:
        pass
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise PowerError(
            f"{path} is damaged ({error}); set limits back with nvidia-smi and remove it"
        ) from error
    return record


@contextmanager
def locked_record(path: Path, boot: str) -> Iterator[LimitRecord]:
    """The record, for one process at a time; others on this machine wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_record(path, boot)


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


def plan(gpus: Gpus, wishes: Sequence[WantedLimit], record: LimitRecord) -> list[LimitChange]:
    """What `apply` would do."""
    seen: dict[str, WantedLimit] = {}
    changes = []
    for wish in wishes:
        try:
            gpu = gpus.find(wish.gpu)
        except NoGpus as error:
            changes.append(LimitChange(None, wish, 0.0, f"no GPU {wish.gpu} ({error})"))
            continue
        entry = record.entries.get(gpu.uuid)
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


def apply(gpus: Gpus, wishes: Sequence[WantedLimit], path: Path, boot: str, holder: str) -> list[Outcome]:
    with locked_record(path, boot) as record:
        return [_apply_one(gpus, change, record, holder) for change in plan(gpus, wishes, record)]


def _apply_one(gpus: Gpus, change: LimitChange, record: LimitRecord, holder: str) -> Outcome:
    wish, gpu = change.wish, change.gpu
    name = gpu.label if gpu else wish.gpu
    if change.problem or gpu is None:
        return Outcome(name, wish.owner, False, change.problem)
    known = gpu.uuid in record.entries
    if not known and not change.needed:
        return Outcome(name, wish.owner, True, f"is at {wish.cap_w:g} W already; nothing to set back")
    record.put(LimitEntry(gpu.uuid, change.original_w, wish.cap_w, wish.owner, holder))
    try:
        gpus.set_limit(gpu.uuid, wish.cap_w)
        now = gpus.find(gpu.uuid).limit_w
    except PowerError as error:
        if not known and isinstance(error, NotPermitted):
            record.remove(gpu.uuid)  # nothing was changed: nothing to set back
        return Outcome(name, wish.owner, False, str(error))
    if not same(now, wish.cap_w):
        return Outcome(name, wish.owner, False, f"set to {wish.cap_w:g} W, but it says {now:g} W")
    return Outcome(name, wish.owner, True, f"{change.original_w:g} W -> {now:g} W")


def restore(
    gpus: Gpus, path: Path, boot: str, holder: str | None = None, named: Sequence[str] = ()
) -> list[Outcome]:
    """Set back what the record has: all of it, one holder's, or of some GPUs."""
    with locked_record(path, boot) as record:
        uuids = {gpus.find(name).uuid for name in named}
        return [
            _restore_one(gpus, entry, record)
            for entry in list(record.entries.values())
            if holder in (None, entry.holder) and (not named or entry.uuid in uuids)
        ]


def _restore_one(gpus: Gpus, entry: LimitEntry, record: LimitRecord) -> Outcome:
    try:
        gpu = gpus.find(entry.uuid)
        left_alone = not same(gpu.limit_w, entry.cap_w) and not same(gpu.limit_w, entry.original_w)
        if not left_alone:
            gpus.set_limit(entry.uuid, entry.original_w)
    except PowerError as error:
        text = f"{error}; still to be set back to {entry.original_w:g} W"
        return Outcome(entry.uuid, entry.owner, False, text)
    record.remove(entry.uuid)
    if left_alone:
        text = f"is at {gpu.limit_w:g} W, set by somebody since; left so (before us: {entry.original_w:g} W)"
        return Outcome(gpu.label, entry.owner, False, text)
    return Outcome(gpu.label, entry.owner, True, f"{gpu.limit_w:g} W -> {entry.original_w:g} W")


def set_back(path: Path, holder: str | None = None, named: Sequence[str] = ()) -> bool:
    """`restore` for who cannot fail: says what was done, and whether all of it was."""
    try:
        with Gpus() as gpus:
            outcomes = restore(gpus, path, boot_id(), holder, named)
    except PowerError as error:
        log.error("power limits not set back, do it with conserve power restore reason=%r", str(error))
        return False
    for outcome in outcomes:
        level = logging.INFO if outcome.done else logging.ERROR
        log.log(
            level, "power limit set back owner=%s gpu=%s done=%r", outcome.owner, outcome.gpu, outcome.text
        )
    return all(outcome.done for outcome in outcomes)


class Told(WorkerError):
    """Somebody ends the guard."""


def main(path: Path, holder: str, grace_s: float) -> int:
    """The guard."""
    signal.signal(signal.SIGTERM, _told)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # held back since before it could be met
        _until_keeper_is_gone()
        if _somebody_else_answers(path, holder, grace_s):
            return 0
    except Told:
        _until_keeper_is_gone(KEEPER_ENDS_S)  # while it lives it would set its cap again
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0 if set_back(path, holder) else 1


def _told(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Told


def _until_keeper_is_gone(limit_s: float | None = None) -> None:
    pipe = sys.stdin.fileno()
    while select.select([pipe], [], [], limit_s)[0] and os.read(pipe, 1024):
        pass


def _somebody_else_answers(path: Path, holder: str, grace_s: float) -> bool:
    """For what this keeper had set, within the grace; or nothing is left to answer for."""
    end = time.monotonic() + grace_s
    while any(entry.holder == holder for entry in read_record(path, boot_id()).entries.values()):
        left = end - time.monotonic()
        if left <= 0.0:
            return False
        time.sleep(min(0.5, left))
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
