"""Membership of an engine in a split: which member keeps which layers, where KV is, and the connections.

Members are numbered by their part of the layers. A kept layer has a region of KV rows for every member, with
as many rows as a member's pool has blocks. This engine's own region comes first, then those of the next parts
in turn.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from placement.overload.drop_plan import MAX_GROUP_SIZE, layer_parts
from workers.engine.overload.orders import DropOrder
from workers.engine.overload.split.peer_link import Message, MessageKind, PeerConnection, PeerRefused


class DeviceLock:
    """Lock of the device, needed because vLLM has one forward context per process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock while waiting for a peer, so that its batches can run (avoids a deadlock)."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class SplitPhase(IntEnum):
    """Phases of a split, in order."""

    WHOLE = 0
    MEETING = 1  # between two iterations; nothing has changed
    OPEN = 2  # layers are dropped, and KV of peers can arrive
    GIVEN = 3  # every peer has received this engine's KV for the layers that the peer keeps
    SPLIT = 4  # batches run through shared layers
    TAKEN = 5  # this engine has fetched its KV back


# Phases after a move of KV. Peers wait longer for them, because one engine may have far more KV than another.
AFTER_EXCHANGE = (SplitPhase.GIVEN, SplitPhase.TAKEN)


@dataclass(frozen=True, slots=True)
class SplitLimits:
    meet_s: float = 10.0  # longest wait for a peer to end its iteration
    answer_s: float = 30.0  # longest wait for one answer, because the peer may be in a long iteration
    order_s: float = 30.0  # limit on all messages of one order, during which streams stand still


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """Settings of the connections between engines."""

    host: str
    secret: bytes
    encrypt: bool = False


@dataclass
class Membership:
    """Record of one split in which this engine takes part, made when it is ordered to drop layers."""

    epoch: int
    part: int  # index of this engine's part
    members: tuple[str, ...]  # host:port of each member's peer server
    parts: tuple[range, ...]  # layers that each member keeps
    blocks: int = 0  # blocks in each member's pool
    connections: dict[int, PeerConnection] = field(default_factory=dict)  # to the other members
    _end: float = math.inf  # when the current order has to be done

    @classmethod
    def from_order(cls, order: DropOrder, layers: int) -> "Membership":
        return cls(order.epoch, order.part, order.members, layer_parts(layers, len(order.members)))

    @property
    def kept(self) -> range:
        return self.parts[self.part]

    @property
    def dropped(self) -> list[int]:
        return [layer for _, layer in self.keepers]

    @property
    def others(self) -> list[int]:
        """Return the other members, the next part first, so that not all ask the same member first."""
        size = len(self.parts)
        return [(self.part + behind) % size for behind in range(1, size)]

    @property
    def keepers(self) -> list[tuple[int, int]]:
        """Return, for each layer that this engine dropped, the member that keeps it and the layer."""
        return [(part, layer) for part in self.others for layer in self.parts[part]]

    @property
    def rows(self) -> int:
        """Return how many KV rows each kept layer has, over the regions of all members."""
        return len(self.parts) * self.blocks

    def region(self, part: int) -> int:
        """Return the first row of a member's region in the layers that are kept here."""
        return (part - self.part) % len(self.parts) * self.blocks

    def sender(self, message: Message) -> int:
        """Return the member that sent a message, or raise PeerRefused if it names no other member."""
        part = message.values.get("part")
        if type(part) is not int or part not in self.others:
            raise PeerRefused(f"{part!r} is no other part of epoch {self.epoch}")
        return part

    def blocks_of(self, message: Message) -> list[int]:
        """Return the blocks that a message names, or raise PeerRefused if one is outside a member's pool."""
        numbers: list[Any] = message.values["rows"]
        for number in numbers:
            if type(number) is not int or not 0 <= number < self.blocks:
                raise PeerRefused(f"{number!r} is no block of a pool of {self.blocks}")
        return numbers

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """Return a context in which every request to a member ends before the time `end`."""
        self._end = end
        try:
            yield
        finally:
            self._end = math.inf

    def connect(self, settings: PeerSettings, limits: SplitLimits) -> None:
        for part in self.others:
            self.connections[part] = PeerConnection(
                self.members[part], settings.secret, limits.answer_s, encrypt=settings.encrypt
            )

    def request(
        self, part: int, kind: MessageKind, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Message:
        message = Message(kind, self.epoch, {**values, "part": self.part}, tensors)
        return self.connections[part].request(message, self._end)

    def meet(self, part: int, phase: SplitPhase) -> Message:
        """Wait until the member with the number `part` has reached a phase, and return its answer."""
        return self.request(part, MessageKind.MEET, {"phase": int(phase), "members": list(self.members)})

    def close(self) -> None:
        for connection in self.connections.values():
            connection.close()


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of an engine with its whole model, from which the KV rows in a split are computed."""

    blocks: int  # blocks in the pool
    row_bytes: int  # KV of a block in a layer
    layer_bytes: Sequence[int]  # bytes of each layer's parameters
    page_bytes: int

    def rows_that_fit(self, kept: range) -> int:
        """Return how many KV rows each kept layer can have in the memory of all KV and the dropped layers.

        Memory is counted in whole pages, because layers share no page.
        """
        dropped = (nbytes for layer, nbytes in enumerate(self.layer_bytes) if layer not in kept)
        kv = len(self.layer_bytes) * self._pages(self.blocks * self.row_bytes)
        return (kv + sum(map(self._pages, dropped))) // len(kept) * self.page_bytes // self.row_bytes

    def most_rows(self) -> int:
        """Return the largest number of KV rows that a layer can have in any split."""
        layers = len(self.layer_bytes)
        sizes = range(2, min(MAX_GROUP_SIZE, layers) + 1)
        fit = (self.rows_that_fit(kept) for size in sizes for kept in layer_parts(layers, size))
        return max(fit, default=self.blocks)

    def _pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)
