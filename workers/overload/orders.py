"""Orders of an engine's scheduler side to its worker, the worker's reports, and their metrics."""

from dataclasses import dataclass, field
from enum import StrEnum

from kvtransfer.metrics import CounterSpec, HistogramSpec


class SplitEvent(StrEnum):
    """How an order ended, and before that what has happened."""

    READY = "ready"  # once, before any order
    NARROWED = "narrowed"  # a restore has begun: the pool is as with the whole model, and parameters come
    LOADED = "loaded"  # they are here, and with all members
    GIVEN = "given"  # no more KV of the prefix cache goes to peers
    SPLIT = "split"
    RESTORED = "restored"
    NOT_SPLIT = "not_split"  # the model is whole, nothing was lost
    NOT_RESTORED = "not_restored"  # split still, nothing was lost
    LOST = "lost"  # the model is whole again; KV that peers had is lost


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


ENDS = tuple(event for event in SplitEvent if event.value not in ("ready", "narrowed", "loaded", "given"))
COUNTERS = {
    "splits": CounterSpec(
        "conserve_splits",
        "Drops and restores of parameters, by how they ended. `lost`: a peer was, and requests were "
        "computed again.",
        "outcome",
        ENDS,
    ),
    "split_batches": CounterSpec(
        "conserve_split_batches",
        "Batches that went through layers of several engines: own ones, which were at peers; and peers', "
        "which were here.",
        "whose",
        ("own", "peer"),
    ),
    "split_peer_seconds": CounterSpec(
        "conserve_split_peer_seconds",
        "Time that own batches were at peers: on the way, waiting for their turn, and computed.",
    ),
    "split_idle_seconds": CounterSpec(
        "conserve_split_idle_seconds",
        "Time that own batches were at peers and nothing was computed here: the pipeline's bubble.",
    ),
    "split_served_seconds": CounterSpec(
        "conserve_split_served_seconds", "Time that peers' batches were computed here."
    ),
    "split_forgotten_blocks": CounterSpec(
        "conserve_split_forgotten_blocks",
        "Blocks that only the prefix cache had, and that a drop or a restore forgot: moving them would have "
        "taken the link more than 5 s, or it took more than 10 s beside serving.",
    ),
    "split_beside_bytes": CounterSpec(
        "conserve_split_beside_bytes",
        "Bytes of KV that only the prefix cache had, and that went to peers or came back beside serving.",
    ),
    "split_beside_wait_seconds": CounterSpec(
        "conserve_split_beside_wait_seconds",
        "Time that own batches waited for KV of the prefix cache that they read and no peer had yet.",
    ),
    "split_exchanged_bytes": CounterSpec(
        "conserve_split_exchanged_bytes",
        "Bytes of KV that went to peers, or came back, while the engine stood still for it. Without the "
        "first message to each peer, which may wait for that.",
    ),
    "split_exchange_seconds": CounterSpec(
        "conserve_split_exchange_seconds",
        "Time that conserve_split_exchanged_bytes took: the link between engines, by which the next drop is "
        "planned.",
    ),
    "split_peer_bytes": CounterSpec("conserve_split_peer_bytes", "Bytes of own batches sent to peers."),
}
_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
HISTOGRAMS = {
    "drop_seconds": HistogramSpec(
        "conserve_split_drop_seconds", "How long an engine stood still for a drop.", _BUCKETS
    ),
    "restore_seconds": HistogramSpec(
        "conserve_split_restore_seconds",
        "How long an engine stood still for a restore, for its pool that shrinks and for its KV that comes "
        "home together; also for a peer that was lost.",
        _BUCKETS,
    ),
    "return_seconds": HistogramSpec(
        "conserve_split_return_seconds",
        "How long parameters took to come back beside serving, until all members had theirs, or were late.",
        _BUCKETS,
    ),
}
