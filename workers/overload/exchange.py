"""KV of dropped layers between members: to who keeps them, and back.

What requests have goes while the engines stand still. What only the prefix cache has goes beside serving, and
batches go first on the link: a piece is sent when none of this engine's is on its way to a peer. But what a
batch is about to read goes before the batch.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

import torch

from workers.overload.channel import Message, PeerAsk, PeerConnection
from workers.overload.errors import PeerError
from workers.overload.membership import Membership
from workers.overload.memory import ROWS_AT_ONCE, ReservedKv, pieces

logger = logging.getLogger("conserve.workers.overload")

YIELD_S = 0.2  # a piece waits no longer for a gap between batches: or it would never go beside long ones


class StandingExchange:
    """One of KV that is waited for, in the worker's thread."""

    def __init__(self, kv: ReservedKv) -> None:
        self._kv = kv
        self._messages: list[tuple[int, int, float]] = []  # part, bytes and seconds

    def give(self, member: Membership, used: Sequence[int]) -> None:
        """The KV of layers that are dropped here, to who keeps them."""
        for part, layer in member.dropped:
            for rows in pieces(used):
                self._ask(member, part, PeerAsk.PUT, layer, rows, [self._kv.read(layer, rows)])

    def take(self, member: Membership, used: Sequence[int]) -> None:
        """And back."""
        for part, layer in member.dropped:
            for rows in pieces(used):
                answer = self._ask(member, part, PeerAsk.GET, layer, rows)
                self._kv.write(layer, rows, answer.tensors[0])

    def _ask(
        self, member: Membership, part: int, kind: PeerAsk, layer: int, rows: list[int],
        tensors: Sequence[torch.Tensor] = (),
    ) -> Message:  # fmt: skip
        began = time.monotonic()
        answer = member.ask(part, kind, {"layer": layer, "rows": rows}, tensors)
        nbytes = sum(tensor.nbytes for tensor in (*tensors, *answer.tensors))
        self._messages.append((part, nbytes, time.monotonic() - began))
        return answer

    def moved(self) -> tuple[int, float]:
        """Bytes and seconds in all since the last time, but for the first message to each peer, which waits
        for it to come as far."""
        messages, self._messages = self._messages, []
        met: set[int] = set()
        total, total_s = 0, 0.0
        for part, nbytes, seconds in messages:
            if part in met:
                total, total_s = total + nbytes, total_s + seconds
            met.add(part)
        return total, total_s


class LinkOrder:
    """What of an engine goes first to its peers: batches, then KV that none of them waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches = 0
        self.beside_bytes = 0  # of KV, so far
        self.waits_s = 0.0  # in which batches waited for some of it

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._changed:
            self._batches += 1
        try:
            yield
        finally:
            with self._changed:
                self._batches -= 1
                self._changed.notify_all()

    def wait_for_a_gap(self, unless: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._batches or unless(), YIELD_S)

    def look_again(self) -> None:
        """Whether who waits for a gap still has to."""
        with self._changed:
            self._changed.notify_all()


class KvBeside:
    """Rows of the dropped layers on their way to who keeps these (PUT), or back (GET), in a thread."""

    def __init__(
        self,
        kind: PeerAsk,
        kv: ReservedKv,
        member: Membership,
        rows: Sequence[int],
        connect: Callable[[int], PeerConnection],
        order: LinkOrder,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """`rows`: of this engine's pool, which go in this order, over lines of the thread's to each part.
        `then`: in the thread, when all have gone."""
        self._kind, self._kv, self._member = kind, kv, member
        self._connect, self._order, self._then = connect, order, then
        self._changed = threading.Condition()
        self._left = dict.fromkeys(rows)
        self._wanted: dict[int, None] = {}
        self._stopped = self._ended = False
        self._failed: Exception | None = None
        self.gone: set[int] = set()
        threading.Thread(target=self._run, name="overload-kv-beside", daemon=True).start()

    def on_the_way(self, rows: Iterable[int]) -> list[int]:
        """Of these rows, those that have not gone yet."""
        with self._changed:
            return [row for row in rows if row in self._left]

    def first(self, rows: Collection[int], limit_s: float) -> None:
        """Returns when these have gone, before all others; a PeerError where they cannot, or not in time."""
        with self._changed:
            self._wanted.update((row, None) for row in rows if row in self._left)
            self._order.look_again()
            self._wait(lambda: not any(row in self._left for row in rows), limit_s)

    def all(self, limit_s: float) -> None:
        with self._changed:
            self._wanted.update(self._left)
            self._order.look_again()
            self._wait(lambda: self._ended, limit_s)

    def end(self, limit_s: float) -> None:
        """Returns when it has ended, well or not, or when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, limit_s)

    def stop(self) -> None:
        """From now on it touches no memory. What is missing is somebody else's to bring."""
        with self._changed:
            self._stopped = self._ended = True
            self._changed.notify_all()
            self._order.look_again()

    def _wait(self, true: Callable[[], bool], limit_s: float) -> None:
        came = self._changed.wait_for(lambda: true() or self._ended, limit_s)
        if self._failed is not None:
            raise PeerError(f"KV did not come to a peer: {self._failed}") from self._failed
        if not came or not true():
            raise PeerError("KV did not come to a peer in time")

    def _run(self) -> None:
        failed: Exception | None = None
        try:
            with torch.inference_mode(), ExitStack() as lines:
                parts = self._member.others if self._left else []
                to = {part: lines.enter_context(closing(self._connect(part))) for part in parts}
                while (some := self._next()) and self._carried(to, some):
                    pass
            if not self._stopped:
                self._then()
        except PeerError as error:
            failed = error
            if not self._stopped:
                logger.warning("KV does not go on beside serving: %s", error)
        except Exception as error:  # torch's, where it finds no memory
            failed = error
            logger.exception("KV does not go on beside serving")
        with self._changed:
            self._failed, self._ended = failed, True
            self._changed.notify_all()

    def _next(self) -> list[int]:
        with self._changed:
            if self._stopped:
                return []
            rows = self._wanted or self._left
            return [row for row, _ in zip(rows, range(ROWS_AT_ONCE), strict=False)]

    def _carried(self, to: Mapping[int, PeerConnection], rows: list[int]) -> bool:
        for part, layer in self._member.dropped:
            self._order.wait_for_a_gap(lambda: bool(self._wanted) or self._stopped)
            if not self._asked(to[part], part, layer, rows):
                return False
        with self._changed:
            for row in rows:
                self._left.pop(row, None)
                self._wanted.pop(row, None)
            self.gone.update(rows)
            self._changed.notify_all()
        return True

    def _asked(self, line: PeerConnection, part: int, layer: int, rows: list[int]) -> bool:
        given: list[torch.Tensor] = []
        with self._changed:
            if self._stopped:
                return False
            if self._kind is PeerAsk.PUT:
                given = [self._kv.read(layer, rows)]
        values = {"layer": layer, "rows": rows, "part": self._member.part}
        answer = line.ask(Message(self._kind, self._member.epoch, values, given))
        with self._changed:
            if self._stopped:
                return False
            if self._kind is PeerAsk.GET:
                self._kv.write(layer, rows, answer.tensors[0])
        self._order.beside_bytes += sum(tensor.nbytes for tensor in (*given, *answer.tensors))
        return True
