"""Orders from the scheduler side of an engine to its worker, and the worker's reports."""

from dataclasses import dataclass
from enum import StrEnum


class SplitEvent(StrEnum):
    """Event that a worker reports, usually the end of an order."""

    READY = "ready"  # reported once, before any order
    SPLIT = "split"  # layers are shared now
    RESTORED = "restored"  # the model is whole again
    NOT_SPLIT = "not_split"  # a drop failed: the model is whole, and nothing was lost
    LOST = "lost"  # the model is whole again, but the KV that peers had is lost


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Order to drop layers, and to compute the kept layers for all members of the split."""

    epoch: int
    members: tuple[str, ...]  # host:port of each member's peer server, in the order of their parts
    part: int  # index of the part of the layers that this engine keeps
    used: list[int]  # blocks whose KV moves with the layers


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Order to restore the whole model."""

    epoch: int
    moves: dict[int, int]  # number of a block that is too high for the whole model's pool -> its new number
    used: list[int]  # blocks whose KV comes back, by their new numbers


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts about a worker that commands and drop plans need."""

    address: str  # host:port of its peer server
    layers: int
    layer_bytes: int
    row_bytes: int  # KV of a block in a layer
    activation_bytes: int  # bytes of one token's activation between two layers


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Report of a worker to its scheduler side after an iteration."""

    event: SplitEvent
    epoch: int  # of the split
    blocks: int  # blocks in the pool from now on
    seconds: float = 0.0  # how long the engine stood still
    reason: str = ""
    facts: WorkerFacts | None = None
    moved_bytes: int = 0  # bytes of KV sent to peers or back
    moved_s: float = 0.0

    def merge(self, other: "SplitReport") -> "SplitReport":
        return self  # an engine that can drop layers has one rank
