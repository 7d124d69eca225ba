"""What the two halves of the checkpoint tell each other, once a step."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Copy:
    """One block and one host slot; the order says in which direction."""

    block: int
    slot: int
    generation: int  # of the slot's contents


@dataclass(frozen=True, slots=True)
class Load:
    """A request waits for these blocks."""

    request_id: str
    copies: list[Copy]


@dataclass(slots=True)
class CheckpointOrder:
    stores: list[Copy] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    beside_step: bool = False  # the model computes meanwhile

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads)


@dataclass(slots=True)
class CheckpointReport:
    stored: Counter[int] = field(default_factory=Counter)  # slots, with the number of ranks done
    corrupt: set[int] = field(default_factory=set)  # slots that did not hold what they should
    failed: set[int] = field(default_factory=set)  # slots whose copy raised

    def __bool__(self) -> bool:
        return bool(self.stored or self.corrupt or self.failed)

    def merge(self, other: "CheckpointReport") -> "CheckpointReport":
        return CheckpointReport(
            self.stored + other.stored, self.corrupt | other.corrupt, self.failed | other.failed
        )
