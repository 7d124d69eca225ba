"""KV of dropped layers between members: to who keeps them, and back.

What requests have goes while the engines stand still. What only the prefix cache has goes beside serving, and
batches go first on the link: a piece is sent when none of this engine's is on its way to a peer. What a batch
is about to read goes before it, over the batch's own line.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice

import torch

from workers.overload.channel import Message, PeerAsk, PeerConnection, PeerError, PeerRefused, SplitOver
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

    def wait_for_a_gap(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._batches, YIELD_S)


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
        limit_s: float,
    ) -> None:
        """`rows`: of this engine's pool, which go in this order, over lines of the thread's to each part.
        After the limit no more of them go."""
        self._kind, self._kv, self._member = kind, kv, member
        self._connect, self._order = connect, order
        self._until = time.monotonic() + limit_s
        self._changed = threading.Condition()
        self._left = dict.fromkeys(rows)
        self._flying: list[int] = []
        self._stopped = self._ended = False
        self._unanswered: PeerError | None = None
        self.gone: list[int] = []
        self.told = False  # that it has ended
        self.fastest = 0, 0.0  # of the messages: bytes and seconds
        threading.Thread(target=self._run, name="overload-kv-beside", daemon=True).start()

    @property
    def ended(self) -> bool:
        """No more of it goes."""
        return self._ended

    @property
    def left(self) -> list[int]:
        with self._changed:
            return [*self._flying, *self._left]

    def check(self) -> None:
        """Raises where a peer has not answered: what it was sent may come at any time, over what is newer."""
        if self._unanswered is not None:
            raise PeerError(f"KV was not taken: {self._unanswered}") from self._unanswered

    def claim(self, rows: Iterable[int], limit_s: float) -> list[int]:
        """Of these rows, those that have not gone: they are the caller's to give, or not, from now on. What
        is flying of them is waited for."""
        asked = set(rows)
        with self._changed:
            mine = self._taken(asked)
            self._changed.wait_for(lambda: self._ended or not asked.intersection(self._flying), limit_s)
            self.check()
            if asked.intersection(self._flying):
                raise PeerError("KV was not taken in time")
            return mine + self._taken(asked)  # what took off and did not land

    def _taken(self, asked: set[int]) -> list[int]:
        taken = [row for row in self._left if row in asked]
        for row in taken:
            del self._left[row]
        return taken

    def end(self, limit_s: float) -> None:
        """Returns when it has ended, well or not, or when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended, limit_s)

    def stop(self) -> None:
        """From now on it touches no memory. What is missing is somebody else's to bring."""
        with self._changed:
            self._stopped = self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            with torch.inference_mode(), ExitStack() as lines:
                parts = self._member.others if self._left else []
                to = {part: lines.enter_context(closing(self._connect(part))) for part in parts}
                while self._takes_off() and self._lands(to):
                    pass
        except PeerError as error:
            logger.warning("KV does not go on beside serving: %s", error)
        except Exception:  # torch's, where it finds no memory
            logger.exception("KV does not go on beside serving")
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _takes_off(self) -> bool:
        with self._changed:
            if self._stopped or time.monotonic() > self._until:
                return False
            self._flying = list(islice(self._left, ROWS_AT_ONCE))
            for row in self._flying:
                del self._left[row]
            return bool(self._flying)

    def _lands(self, to: Mapping[int, PeerConnection]) -> bool:
        """Whether it has: or it is left, as it was."""
        landed = False
        try:
            for part, layer in self._member.dropped:
                self._order.wait_for_a_gap()
                if not self._asked(to[part], layer):
                    return False
            landed = True
        finally:
            with self._changed:
                if landed:
                    self.gone += self._flying
                else:
                    self._left.update(dict.fromkeys(self._flying))
                self._flying = []
                self._changed.notify_all()
        return True

    def _asked(self, line: PeerConnection, layer: int) -> bool:
        given: list[torch.Tensor] = []
        with self._changed:
            if self._stopped or time.monotonic() > self._until:
                return False
            if self._kind is PeerAsk.PUT:
                given = [self._kv.read(layer, self._flying)]
        values = {"layer": layer, "rows": self._flying, "part": self._member.part}
        began = time.monotonic()
        try:
            answer = line.ask(Message(self._kind, self._member.epoch, values, given))
        except (PeerRefused, SplitOver):
            raise
        except PeerError as error:
            self._unanswered = error
            raise
        with self._changed:
            if self._stopped:
                return False
            if self._kind is PeerAsk.GET:
                self._kv.write(layer, self._flying, answer.tensors[0])
        self._saw(sum(tensor.nbytes for tensor in (*given, *answer.tensors)), time.monotonic() - began)
        return True

    def _saw(self, nbytes: int, seconds: float) -> None:
        self._order.beside_bytes += nbytes
        if nbytes * self.fastest[1] >= self.fastest[0] * seconds:
            self.fastest = nbytes, seconds
