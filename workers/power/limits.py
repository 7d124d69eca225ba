"""Power limits: plans, sets and restores them, with a record of the original limits on disk.

An entry of the record is on disk from before its limit is set until the limit is restored, so that any later
process can restore it. A reboot resets limits, and voids the record.

python -m workers.power.limits RECORD HOLDER GRACE_S runs the *guard*, which restores limits when their keeper
is gone. Its standard input is a pipe from the keeper, which closes when the keeper ends. GRACE_S later, the
guard restores the entries that still name HOLDER as their holder; a restarted keeper has replaced the name.
SIGTERM, which `conserve down` sends to keeper and guard, means that no keeper follows. Then the guard does
not wait for GRACE_S.
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
SAME_W = 0.5  # limits that differ by less are equal: they are in milliwatts, and some boards round to watts
KEEPER_ENDS_S = 8.0  # longest wait for the keeper's end; less than the time from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class LimitEntry:
    """Entry of the record: a changed limit that has to be restored."""

    uuid: str
    original_w: float
    cap_w: float
    owner: str  # engine or person for whom the limit was changed
    holder: str  # process that will restore the limit; another process takes over by writing its own name


@dataclass(slots=True)
class LimitRecord:
    """Record of the limits changed since this boot. A change is on disk when its method returns."""

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
        content = msgspec.json.decode(path.read_bytes())
        if content["boot"] == boot:
            record.entries = msgspec.convert(content["entries"], dict[str, LimitEntry])
    except FileNotFoundError:
        pass
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        advice = "restore the limits with nvidia-smi and remove the file"
        raise PowerError(f"{path} is damaged ({error}); {advice}") from error
    return record


@contextmanager
def locked_record(path: Path, boot: str) -> Iterator[LimitRecord]:
    """Open the record for one process at a time; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_record(path, boot)


@dataclass(frozen=True, slots=True)
class WantedLimit:
    """Power cap that its owner wants for one GPU."""

    gpu: str  # index or UUID
    cap_w: float
    owner: str


@dataclass(frozen=True, slots=True)
class LimitChange:
    """Planned change of one GPU's limit, or the reason why the limit will not be set."""

    gpu: Gpu | None
    wish: WantedLimit
    original_w: float  # the limit to restore later
    problem: str = ""  # why the limit will not be set

    @property
    def needed(self) -> bool:
        return not self.problem and self.gpu is not None and not same(self.gpu.limit_w, self.wish.cap_w)


def same(one_w: float, other_w: float) -> bool:
    return abs(one_w - other_w) < SAME_W


def plan(gpus: Gpus, wishes: Sequence[WantedLimit], record: LimitRecord) -> list[LimitChange]:
    """Return a change for each wish, as `apply` would make it."""
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
    if not gpu.takes_limits:
        return "the driver of this GPU reports no power limits, so that it takes no cap"
    if not gpu.least_w <= wish.cap_w <= gpu.most_w:
        return f"this GPU accepts {gpu.least_w:g} to {gpu.most_w:g} W, not {wish.cap_w:g} W"
    return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of setting or restoring one limit, as people read it."""

    gpu: str  # such as "0 (NVIDIA A40)", or the name in the wish
    owner: str
    done: bool
    text: str


def apply(gpus: Gpus, wishes: Sequence[WantedLimit], path: Path, boot: str, holder: str) -> list[Outcome]:
    """Set the wanted limits, and record `holder` as the process that restores them."""
    with locked_record(path, boot) as record:
        return [_apply_one(gpus, change, record, holder) for change in plan(gpus, wishes, record)]


def _apply_one(gpus: Gpus, change: LimitChange, record: LimitRecord, holder: str) -> Outcome:
    wish, gpu = change.wish, change.gpu
    name = gpu.label if gpu else wish.gpu
    if change.problem or gpu is None:
        return Outcome(name, wish.owner, False, change.problem)
    known = gpu.uuid in record.entries
    if not known and not change.needed:
        return Outcome(name, wish.owner, True, f"is at {wish.cap_w:g} W already; nothing to restore")
    record.put(LimitEntry(gpu.uuid, change.original_w, wish.cap_w, wish.owner, holder))
    try:
        gpus.set_limit(gpu.uuid, wish.cap_w)
        now = gpus.find(gpu.uuid).limit_w
    except PowerError as error:
        if not known and isinstance(error, NotPermitted):
            record.remove(gpu.uuid)  # nothing was changed
        return Outcome(name, wish.owner, False, str(error))
    if not same(now, wish.cap_w):
        return Outcome(name, wish.owner, False, f"set to {wish.cap_w:g} W, but the GPU reports {now:g} W")
    return Outcome(name, wish.owner, True, f"{change.original_w:g} W -> {now:g} W")


def restore(
    gpus: Gpus, path: Path, boot: str, holder: str | None = None, named: Sequence[str] = ()
) -> list[Outcome]:
    """Restore the limits in the record: all of them, those of `holder`, or those of the `named` GPUs."""
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
        text = f"{error}; still to be restored to {entry.original_w:g} W"
        return Outcome(entry.uuid, entry.owner, False, text)
    record.remove(entry.uuid)
    if left_alone:
        text = f"left at {gpu.limit_w:g} W, which somebody else set (original: {entry.original_w:g} W)"
        return Outcome(gpu.label, entry.owner, False, text)
    return Outcome(gpu.label, entry.owner, True, f"{gpu.limit_w:g} W -> {entry.original_w:g} W")


def set_back(path: Path, holder: str | None = None, named: Sequence[str] = ()) -> bool:
    """Restore limits as `restore` does, log the outcomes and errors, and return whether all were restored."""
    try:
        with Gpus() as gpus:
            outcomes = restore(gpus, path, boot_id(), holder, named)
    except PowerError as error:
        log.error("power limits are not restored, run conserve power restore reason=%r", str(error))
        return False
    for outcome in outcomes:
        level = logging.INFO if outcome.done else logging.ERROR
        text = "power limit restored owner=%s gpu=%s done=%r"
        log.log(level, text, outcome.owner, outcome.gpu, outcome.text)
    return all(outcome.done for outcome in outcomes)


class GuardStopped(WorkerError):
    """Exception that SIGTERM raises in the guard, because no keeper will take over."""


def main(path: Path, holder: str, grace_s: float) -> int:
    """Run the guard: wait until the keeper is gone, then restore its limits."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by the parent until now
        _until_keeper_is_gone()
        if _taken_over(path, holder, grace_s):
            return 0
    except GuardStopped:
        _until_keeper_is_gone(KEEPER_ENDS_S)  # a live keeper would set its cap again
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0 if set_back(path, holder) else 1


def _stop(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise GuardStopped


def _until_keeper_is_gone(limit_s: float | None = None) -> None:
    pipe = sys.stdin.fileno()
    while select.select([pipe], [], [], limit_s)[0] and os.read(pipe, 1024):
        pass


def _taken_over(path: Path, holder: str, grace_s: float) -> bool:
    """Return True as soon as no entry names `holder`, or False if an entry still does after `grace_s`."""
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
