"""Set limits and set them back. The old limit is on disk before the new one is on the GPU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.power import record
from workers.power.nvml import Gpu, Gpus, NoGpus, NotPermitted, PowerError
from workers.power.plan import Change, Wish, plan, same

log = logging.getLogger("conserve.workers.power")


@dataclass(frozen=True, slots=True)
class Outcome:
    gpu: str  # "0 (NVIDIA A40)", or the name that was asked for
    owner: str
    done: bool
    text: str


def look(gpus: Gpus, wishes: Sequence[Wish], path: Path, boot: str) -> list[Change]:
    """The dry run."""
    return plan(wishes, _found(gpus, wishes), record.read(path, boot))


def apply(gpus: Gpus, wishes: Sequence[Wish], path: Path, boot: str, holder: str) -> list[Outcome]:
    with record.locked(path, boot) as changes:
        planned = plan(wishes, _found(gpus, wishes), changes.entries)
        return [_apply_one(gpus, change, changes, holder) for change in planned]


def _found(gpus: Gpus, wishes: Sequence[Wish]) -> dict[str, Gpu]:
    found: dict[str, Gpu] = {}
    for wish in wishes:
        try:
            found[wish.gpu] = gpus.find(wish.gpu)
        except NoGpus as error:
            log.warning("%s", error)
    return found


def _apply_one(gpus: Gpus, change: Change, changes: record.Changes, holder: str) -> Outcome:
    wish, gpu = change.wish, change.gpu
    if change.problem or gpu is None:
        return Outcome(_name(gpu, wish), wish.owner, False, change.problem)
    before = changes.entries.get(gpu.uuid)
    if before is None and not change.needed:
        return Outcome(
            _name(gpu, wish), wish.owner, True, f"is at {wish.cap_w:g} W already; nothing to set back"
        )
    changes.put(record.Entry(gpu.uuid, change.original_w, wish.cap_w, wish.owner, holder))
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
    with record.locked(path, boot) as changes:
        chosen = [
            entry
            for entry in changes.entries.values()
            if owner in (None, entry.owner)
            and holder in (None, entry.holder)
            and (uuids is None or entry.uuid in uuids)
        ]
        return [_restore_one(gpus, entry, changes) for entry in chosen]


def _restore_one(gpus: Gpus, entry: record.Entry, changes: record.Changes) -> Outcome:
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


def _name(gpu: Gpu | None, wish: Wish | None) -> str:
    if gpu is not None:
        return f"{gpu.index} ({gpu.name})"
    return wish.gpu if wish is not None else ""
