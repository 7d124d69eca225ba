"""Membership of an engine in a split: which layers are where, whose KV is in which rows, and the lines to the
other members.

Members are numbered by their part of the layers. A kept layer has a region of rows for each of them, as many
as a pool has blocks: this engine's own first, behind them those of the next part, and around.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from placement.overload.drop_plan import MOST_ENGINES, parts_of
from workers.overload.channel import Message, PeerAsk, PeerConnection, PeerRefused
from workers.overload.orders import DropOrder


class DeviceLock:
    """The turn to compute: vLLM has one forward context a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """By who has it and waits for a peer, whose batches go on: or both would wait for ever."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()


class SplitPhase(IntEnum):
    """In the order in which they are passed through."""

    WHOLE = 0
    MEETING = 1  # at a step boundary; nothing has changed
    OPEN = 2  # parameters are dropped; peers' KV can come
    GIVEN = 3  # each peer has the KV of requests that is its to keep
    SPLIT = 4
    MOVED = 5  # at a step boundary; own blocks are in the places of a whole model's pool
    ALL_MOVED = 6  # each has seen that the others have come; who has not been seen is not in it
    NARROW = 7  # pools are as large as those; parameters come back beside serving
    LOADED = 8  # they are here
    LEAVING = 9  # at a step boundary; peers' batches still come
    ALL_LEAVE = 10
    TAKEN = 11  # all own KV is back


EXCHANGED = (
    SplitPhase.GIVEN,
    SplitPhase.TAKEN,
)  # behind KV, of which one member may have far more than another


@dataclass(frozen=True, slots=True)
class SplitLimits:
    meet_s: float = 10.0  # for a peer to come to a step boundary
    answer_s: float = 30.0  # of one message: the peer may be in a long step of its own
    order_s: float = 30.0  # of all messages of one order: streams stand still meanwhile
    load_s: float = 60.0  # for all members' parameters to be back; streams go on
    beside_s: float = 10.0  # for KV of the prefix cache, beside serving: the rest is forgotten


@dataclass(frozen=True, slots=True)
class PeerLine:
    """How peers reach this engine, and it them."""

    host: str
    secret: bytes
    encrypt: bool = False


@dataclass
class Membership:
    """In one split, from its order on."""

    epoch: int
    part: int  # of this engine
    members: tuple[str, ...]  # host:port of each one's peer server
    parts: tuple[range, ...]  # of the layers, what each keeps
    blocks: int = 0  # of each engine's pool
    lines: dict[int, PeerConnection] = field(default_factory=dict)  # to the other members
    _end: float = math.inf  # of what is asked now

    @classmethod
    def of(cls, order: DropOrder, layers: int) -> "Membership":
        return cls(order.epoch, order.part, order.members, parts_of(layers, len(order.members)))

    @property
    def kept(self) -> range:
        return self.parts[self.part]

    @property
    def gone(self) -> list[int]:
        return [layer for _, layer in self.dropped]

    @property
    def others(self) -> list[int]:
        """Parts, each engine beginning with the one behind its own: not all of them at one."""
        size = len(self.parts)
        return [(self.part + behind) % size for behind in range(1, size)]

    @property
    def dropped(self) -> list[tuple[int, int]]:
        """Each layer that is gone, behind the part that keeps it."""
        return [(part, layer) for part in self.others for layer in self.parts[part]]

    @property
    def rows(self) -> int:
        """Of a kept layer."""
        return len(self.parts) * self.blocks

    def region(self, part: int) -> int:
        """The first row of that member's blocks in layers that are kept here."""
        return (part - self.part) % len(self.parts) * self.blocks

    def sender(self, message: Message) -> int:
        """Its part. Who is no other member, or does not say, is refused."""
        part = message.values.get("part")
        if type(part) is not int or part not in self.others:
            raise PeerRefused(f"{part!r} is no other part of epoch {self.epoch}")
        return part

    def rows_of(self, message: Message) -> list[int]:
        """Those that it names, of the sender's pool: no other member's."""
        return [self._block(row) for row in message.values["rows"]]

    def moves_of(self, message: Message) -> dict[int, int]:
        return {self._block(old): self._block(new) for old, new in message.values["moves"]}

    def _block(self, row: Any) -> int:
        if type(row) is not int or not 0 <= row < self.blocks:
            raise PeerRefused(f"{row!r} is no block of a pool of {self.blocks}")
        return row

    # What this engine asks of the others

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """All that is asked meanwhile is answered by then: each of many answers may come in its own time."""
        self._end = end
        try:
            yield
        finally:
            self._end = math.inf

    def connect(self, line: PeerLine, limits: SplitLimits) -> None:
        for part in self.others:
            self.lines[part] = self.another_line(part, line, limits)

    def another_line(self, part: int, line: PeerLine, limits: SplitLimits) -> PeerConnection:
        """For another thread than the worker's."""
        return PeerConnection(self.members[part], line.secret, limits.answer_s, encrypt=line.encrypt)

    def ask(
        self, part: int, kind: PeerAsk, values: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()
    ) -> Message:
        message = Message(kind, self.epoch, {**values, "part": self.part}, tensors)
        return self.lines[part].ask(message, self._end)

    def meet(self, part: int, phase: SplitPhase) -> Message:
        """Until that member has come as far."""
        return self.ask(part, PeerAsk.MEET, self._meeting(phase))

    def meet_beside(self, part: int, phase: SplitPhase, line: PeerLine, limits: SplitLimits) -> None:
        """The same, in another thread than the worker's: over a connection of its own."""
        with closing(self.another_line(part, line, limits)) as connection:
            values = {**self._meeting(phase), "part": self.part}
            connection.ask(Message(PeerAsk.MEET, self.epoch, values))

    def _meeting(self, phase: SplitPhase) -> dict[str, Any]:
        return {"phase": int(phase), "members": list(self.members)}

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Of one engine with its whole model: what of it there is to share out."""

    blocks: int  # of its pool
    row_bytes: int  # KV of a block in a layer
    layer_bytes: Sequence[int]  # of each layer's parameters
    page_bytes: int

    def rows_that_fit(self, kept: range) -> int:
        """Of each kept layer, in the memory of all KV and of the parameters that are dropped: in whole pages,
        for a layer's KV and a layer's parameters share none."""
        gone = (nbytes for layer, nbytes in enumerate(self.layer_bytes) if layer not in kept)
        kv = len(self.layer_bytes) * self._pages(self.blocks * self.row_bytes)
        return (kv + sum(map(self._pages, gone))) // len(kept) * self.page_bytes // self.row_bytes

    def most_rows(self) -> int:
        """Of a layer in any split that there may be."""
        layers = len(self.layer_bytes)
        sizes = range(2, min(MOST_ENGINES, layers) + 1)
        fit = (self.rows_that_fit(kept) for n in sizes for kept in parts_of(layers, n))
        return max(fit, default=self.blocks)

    def _pages(self, nbytes: int) -> int:
        return -(-nbytes // self.page_bytes)
