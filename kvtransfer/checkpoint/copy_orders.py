"""Messages from the checkpoint's scheduler side to its worker sides (orders), and back (reports)."""

from collections import Counter
from dataclasses import dataclass, field

FIRST_DISK_SLOT = 1 << 32  # slots with smaller numbers are in host memory


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one block to or from a host slot. `CheckpointOrder` says in which direction."""

    block: int
    slot: int
    generation: int  # generation of the slot's contents: each later block in the slot has a higher one


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Load of the blocks that a request or a prefetch waits for."""

    request_id: str
    copies: list[BlockCopy]
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class DiskMove:
    """Move of one block from host memory to the disk."""

    slot: int
    generation: int  # generation of the slot's contents
    disk_slot: int
    disk_generation: int


@dataclass(slots=True)
class CheckpointOrder:
    """Copies that the workers begin when a step begins."""

    stores: list[BlockCopy] = field(default_factory=list)
    loads: list[BlockLoad] = field(default_factory=list)
    moves: list[DiskMove] = field(default_factory=list)
    beside_step: bool = False  # the model computes meanwhile

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.moves)


@dataclass(slots=True)
class CheckpointReport:
    """Copies that ended since the last report, successful or not."""

    stored: Counter[int] = field(default_factory=Counter)  # slot -> number of ranks that ended the copy
    corrupt: set[int] = field(default_factory=set)  # slots whose contents failed their check
    failed: set[int] = field(default_factory=set)  # slots whose copy raised an exception
    prefetched: Counter[str] = field(default_factory=Counter)  # prefetch -> number of ranks that ended it
    unfilled: set[int] = field(default_factory=set)  # blocks that a prefetch did not fill
    moved: Counter[int] = field(default_factory=Counter)  # disk slot -> number of ranks that ended the move
    unmoved: set[int] = field(default_factory=set)  # disk slots that could not be written

    def __bool__(self) -> bool:
        return bool(self.stored or self.corrupt or self.failed or self.prefetched or self.moved)

    def merge(self, other: "CheckpointReport") -> "CheckpointReport":
        return CheckpointReport(
            self.stored + other.stored,
            self.corrupt | other.corrupt,
            self.failed | other.failed,
            self.prefetched + other.prefetched,
            self.unfilled | other.unfilled,
            self.moved + other.moved,
            self.unmoved | other.unmoved,
        )
