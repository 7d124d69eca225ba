"""Orders of an engine's scheduler side to its worker, and the worker's reports. An order of a step in which
nothing changes is the forecast of its batch, for the other members."""

from dataclasses import dataclass, field

from placement.overload.lookahead import Forecast
from workers.overload.metrics import SplitEvent


@dataclass(frozen=True, slots=True)
class DropOrder:
    epoch: int
    members: tuple[str, ...]  # host:port of each one's peer server, in the order of their parts
    part: int  # of the layers, the one that is kept here
    used: list[int]  # blocks of requests
    cached: list[int] = field(default_factory=list)  # of the prefix cache alone: they go beside serving


@dataclass(frozen=True, slots=True)
class NarrowOrder:
    """The beginning of a restore: the pool has as many blocks as with the whole model."""

    epoch: int
    moves: dict[int, int]  # blocks of the pool that shrank, and their new places
    cached: list[int] = field(
        default_factory=list
    )  # of the prefix cache alone: they come home beside serving


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Its end: all members have their parameters."""

    epoch: int
    used: list[int]  # blocks that hold something, but for those whose KV has come home and is as it was
    last: bool = False  # who is late again is lost


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    address: str  # host:port of its peer server
    layers: int
    layer_bytes: int
    row_bytes: int  # KV of a block in a layer
    activation_bytes: int  # of a token between two layers


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What the scheduler side is told after the step."""

    event: SplitEvent
    epoch: int
    blocks: int  # of the pool from now on
    seconds: float = 0.0
    why: str = ""
    facts: WorkerFacts | None = None
    moved_bytes: int = 0  # of KV, to peers or back
    moved_s: float = 0.0
    rows: list[int] = field(default_factory=list)  # GIVEN: blocks that have not gone; LOADED: that have come

    def merge(self, other: "SplitReport") -> "SplitReport":
        return self  # one rank


@dataclass(frozen=True, slots=True)
class PeersForecasts:
    """What other members said of their next batches, by part: each with how long ago, in seconds."""

    said: dict[int, tuple[Forecast, float]]

    def merge(self, other: "PeersForecasts") -> "PeersForecasts":
        return self  # one rank
