"""What would be changed, before anything is: a pure decision on what GPUs say and what is wanted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.power.nvml import Gpu
from workers.power.record import Record

SAME_W = 0.5  # limits are kept in milliwatts, some boards round to whole watts


@dataclass(frozen=True, slots=True)
class Wish:
    """A limit for one GPU, by index or UUID."""

    gpu: str
    cap_w: float
    owner: str


@dataclass(frozen=True, slots=True)
class Change:
    gpu: Gpu | None
    wish: Wish
    original_w: float  # what it is to be set back to
    problem: str = ""  # why it will not be done

    @property
    def needed(self) -> bool:
        return not self.problem and self.gpu is not None and not same(self.gpu.limit_w, self.wish.cap_w)


def same(one_w: float, other_w: float) -> bool:
    return abs(one_w - other_w) < SAME_W


def plan(wishes: Sequence[Wish], found: Mapping[str, Gpu], record: Record) -> list[Change]:
    """`found`: the GPUs of the wishes that exist, by the name they were wished for."""
    seen: dict[str, Wish] = {}
    changes = []
    for wish in wishes:
        gpu = found.get(wish.gpu)
        if gpu is None:
            changes.append(Change(None, wish, 0.0, f"this machine has no GPU {wish.gpu}"))
            continue
        entry = record.get(gpu.uuid)
        original = entry.original_w if entry else gpu.limit_w
        changes.append(Change(gpu, wish, original, _problem(gpu, wish, seen.get(gpu.uuid))))
        seen.setdefault(gpu.uuid, wish)
    return changes


def _problem(gpu: Gpu, wish: Wish, other: Wish | None) -> str:
    if other is not None and not same(other.cap_w, wish.cap_w):
        return f"{other.owner} wants {other.cap_w:g} W of the same GPU"
    if not gpu.least_w <= wish.cap_w <= gpu.most_w:
        return f"{wish.cap_w:g} W is outside of {gpu.least_w:g} to {gpu.most_w:g} W, which this GPU takes"
    return ""
