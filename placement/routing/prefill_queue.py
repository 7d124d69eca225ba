"""The prefiller that would finish first: what is queued on it, plus the prefill curve at this prompt.

The curve says how many seconds of a prefiller's time a prompt takes. Attention makes that quadratic in the
prompt, and the prompt's length is known at arrival: what can be read becomes what has to be known, when a
prefiller will be free. The curve is a guess until the engine reports the one of its latency model, which was
profiled or follows its iterations; its scale follows what prompts took.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from placement.routing.engine_table import OPTIONS, EngineTable
from placement.routing.receipts import PrefillerChoice, PrefillerOption, Why
from placement.scheduling.prefill_curve import PrefillCurve


class Queued(NamedTuple):
    seconds: float
    placed_at: float
    ahead_s: float  # what its class is worth: the engine computes a better one's prompt first


TYPICAL = 8192  # tokens, at which two curves are compared
REMEMBERED = 0.9  # of what was learned, at each prompt
HALF_LIFE_S = 20.0  # of what an engine has shown, while it computes nothing
SLOWEST, FASTEST = 20.0, 0.05


@dataclass(slots=True)
class Learned:
    """Seconds that prompts of an engine took, and what its curve says of them.

    They are counted while there is a queue, from the end of the prompt before: the sums hold in whatever
    order the engine computes, and with several at once.
    """

    took_s: float = 0.0
    expected_s: float = 0.0
    since: float = 0.0  # the queue began, or the prompt before ended
    ended: float = 0.0  # the prompt before

    def prompt(self, expected_s: float, now: float) -> None:
        remembered = REMEMBERED
        if not self.expected_s:
            self.took_s = self.expected_s = expected_s  # the curve counts as much as the first prompt
        else:
            remembered *= 0.5 ** (max(0.0, self.since - self.ended) / HALF_LIFE_S)
        self.took_s = remembered * self.took_s + max(0.0, now - self.since)
        self.expected_s = remembered * self.expected_s + expected_s
        self.since = self.ended = now

    def redraw(self, factor: float) -> None:
        """The curve says `factor` times what it said before."""
        self.expected_s *= factor

    @property
    def scale(self) -> float:
        """Of the curve."""
        return min(max(self.took_s / self.expected_s, FASTEST), SLOWEST) if self.expected_s else 1.0


class Prefillers:
    """Queues of the prefillers as the placer knows them: first come, first served, one prompt at a time;
    those of a better class before others.

    Column `free_at` is when all that is queued will be done; `behind` is the seconds queued after the prompt
    that is running: when that one overruns its estimate, at least those are still to come.
    """

    def __init__(self) -> None:
        # `closed` is infinite where no work may be placed, so that adding it takes the row out of a choice.
        self._table = EngineTable(free_at=0.0, behind=0.0, a=0.0, b=0.0, c=0.0, closed=inf)
        self._queues: dict[str, OrderedDict[str, Queued]] = {}
        self._where: dict[str, str] = {}  # conversation -> prefiller
        self._worths = Counter[float]()  # of all that is queued, how many have a class worth so much
        self._guesses: dict[str, PrefillCurve] = {}
        self._curves: dict[str, PrefillCurve] = {}
        self._taken: dict[str, tuple[PrefillCurve, float]] = {}  # at the last report
        self._learned: dict[str, Learned] = {}  # an engine that restarts is as fast as it was

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, engine: str) -> bool:
        return engine in self._queues

    def add(self, engine: str, curve: PrefillCurve) -> None:
        self._table.add(engine, free_at=-inf, closed=0.0)
        self._queues[engine] = OrderedDict()
        if self._guesses.get(engine) != curve:
            self._guesses[engine] = self._curves[engine] = curve
            self._learned[engine] = Learned()
        self._taken[engine] = self._curves[engine], 1.0
        self._draw(engine)

    def reported(
        self, engine: str, own: PrefillCurve, taken: PrefillCurve | None = None, fresh: float = 1.0
    ) -> None:
        """The engine's own curve, and what it is taken to be. What was learned of its prompts stays, as a
        scale of its own; of a scale that makes it slower, `fresh` counts."""
        before, learned = self._curves[engine], self._learned[engine]
        if own != before:
            learned.redraw(own.seconds(TYPICAL) / before.seconds(TYPICAL))
            self._curves[engine] = own
        self._taken[engine] = taken or own, fresh
        self._draw(engine)

    def remove(self, engine: str) -> tuple[str, ...]:
        """Forget an engine; returns the conversations whose prefill was queued there."""
        self._table.remove(engine)
        lost = self._queues.pop(engine)
        for key, queued in lost.items():
            del self._where[key]
            self._not_queued(queued)
        return tuple(lost)

    def set_draining(self, engine: str, draining: bool) -> None:
        self._table["closed"][self._table.row(engine)] = inf if draining else 0.0

    def open(self) -> int:
        """How many take prompts."""
        return int(np.count_nonzero(self._table["closed"] == 0.0))

    def mean_prefill_s(self, tokens: int) -> float | None:
        """Of this prompt on one of them; None when none takes prompts."""
        open_, table = self._table["closed"] == 0.0, self._table
        if not open_.any():
            return None
        return float((table["a"] + table["b"] * tokens + table["c"] * tokens * tokens)[open_].mean())

    def shortest_wait_s(self, now: float) -> float:
        """Before a prompt could start; 0 when none takes prompts."""
        wait = np.maximum(self._table["free_at"] - now, self._table["behind"])[self._table["closed"] == 0.0]
        return max(0.0, float(wait.min())) if wait.size else 0.0

    def choose(self, tokens: int, now: float, ahead_s: float = 0.0) -> PrefillerChoice | None:
        """The prefiller that would finish `tokens` first; None when none takes work."""
        table = self._table
        # In place where it can be: at a thousand rows an array that is made costs as much as the sum in it.
        wait = table["free_at"] - now
        np.maximum(wait, table["behind"], out=wait)  # `behind` is never below zero
        if self._passes_some(ahead_s):
            for engine in filter(self._queues.get, self._queues):
                wait[table.row(engine)] = self.wait_s(engine, now, ahead_s)
        prefill = table["c"] * tokens
        prefill += table["b"]
        prefill *= tokens
        prefill += table["a"]
        finish = wait + prefill
        finish += table["closed"]
        options = [
            PrefillerOption(table.name(row), wait.item(row), prefill.item(row))
            for row in table.least(finish, OPTIONS)
        ]
        if not options:
            return None
        return PrefillerChoice(Why.FINISHES_FIRST, options[0], tuple(options[1:]), len(self._queues))

    def soonest(self, engines: Iterable[str], most: int, now: float) -> list[str]:
        """Of these those that take work, no more than so many: the ones with the shortest queues."""
        names = [name for name in engines if name in self._queues]
        if len(names) <= most:
            return names
        rows = [self._table.row(name) for name in names]
        waits = np.maximum(self._table["free_at"][rows] - now, self._table["behind"][rows])
        waits += self._table["closed"][rows]
        return [names[index] for index in np.argpartition(waits, most)[:most]]

    def option(
        self, engine: str, tokens: int, now: float, cached: int = 0, ahead_s: float = 0.0
    ) -> PrefillerOption | None:
        """This prefiller, which has `cached` of the tokens already; None when it takes no work."""
        if engine not in self._queues or self._table["closed"][self._table.row(engine)]:
            return None
        row, table = self._table.row(engine), self._table
        seconds = table["a"][row] + tokens * (table["b"][row] + tokens * table["c"][row])
        seconds -= cached * (table["b"][row] + cached * table["c"][row])
        return PrefillerOption(engine, self.wait_s(engine, now, ahead_s), float(seconds), cached)

    def enqueue(self, engine: str, key: str, seconds: float, now: float, ahead_s: float = 0.0) -> None:
        self.done(key, now)  # a conversation placed again leaves its old queue
        row, queue = self._table.row(engine), self._queues[engine]
        self._where[key] = engine
        self._worths[ahead_s] += 1
        if not queue:
            self._table["free_at"][row] = now + seconds
            self._learned[engine].since = now
            queue[key] = Queued(seconds, now, ahead_s)
            return
        self._table["free_at"][row] = now + self.wait_s(engine, now) + seconds
        queue[key] = Queued(seconds, now, ahead_s)
        first = _first(queue)
        # One that goes before the prompt under way has that behind it.
        self._table["behind"][row] += seconds if first != key else _seconds(queue) - seconds

    def computed(self, key: str, tokens: int, now: float, cached: int = 0) -> None:
        """A prefill ended; `tokens` is what the engine counted, 0 where it said nothing; it had `cached`."""
        engine = self._where.get(key)
        if engine is not None and tokens:
            curve = self._curves[engine]
            seconds = curve.seconds(tokens) - (curve.seconds(cached) - curve.a if cached else 0.0)
            self._learned[engine].prompt(seconds, now)
            self._taken[engine] = curve, 1.0
            self._draw(engine)
        self.done(key, now)

    def done(self, key: str, now: float) -> None:
        """A prefill ended, or will never run."""
        engine = self._where.pop(key, None)
        if engine is None:
            return
        row, queue = self._table.row(engine), self._queues[engine]
        was_running = key == _first(queue)
        seconds = self._not_queued(queue.pop(key)).seconds
        if not was_running:
            self._table["behind"][row] = max(0.0, self._table["behind"][row] - seconds)
            self._table["free_at"][row] -= seconds
        elif queue:
            following = _seconds(queue)
            self._table["free_at"][row] = now + following
            self._table["behind"][row] = max(0.0, following - queue[_first(queue)].seconds)
        else:
            self._table["free_at"][row] = now
            self._table["behind"][row] = 0.0

    def remaining_s(self, key: str, now: float) -> float:
        """Until a queued prefill will be done, as far as is known."""
        engine = self._where[key]
        following, seen = 0.0, False
        in_turn = sorted(self._queues[engine].items(), key=lambda one: -one[1].ahead_s)
        for queued, (seconds, _, _) in in_turn:
            following += seconds if seen else 0.0
            seen = seen or queued == key
        return max(0.0, self.wait_s(engine, now) - following)

    def engine_of(self, key: str) -> str | None:
        """That has a prefill of this conversation to come."""
        return self._where.get(key)

    def forget_placed_before(self, engine: str, before: float, now: float) -> None:
        """The engine says it has nothing to do: the ends of what was placed before then were not reported."""
        for key in [k for k, queued in self._queues[engine].items() if queued.placed_at < before]:
            self.done(key, now)

    def wait_s(self, engine: str, now: float, ahead_s: float = -inf) -> float:
        """For a prompt whose class is worth so much; for one of the least, if nothing is said."""
        row = self._table.row(engine)
        wait_s = float(max(self._table["free_at"][row] - now, self._table["behind"][row], 0.0))
        if not self._passes_some(ahead_s):
            return wait_s
        return min(wait_s, _seconds(self._queues[engine], ahead_s))

    def _passes_some(self, ahead_s: float) -> bool:
        """Among all that is queued there is what goes behind it."""
        return any(worth < ahead_s for worth in self._worths)

    def _not_queued(self, queued: Queued) -> Queued:
        self._worths[queued.ahead_s] -= 1
        if not self._worths[queued.ahead_s]:
            del self._worths[queued.ahead_s]
        return queued

    def _draw(self, engine: str) -> None:
        """Its curve as it is known now."""
        row, (curve, fresh), scale = self._table.row(engine), self._taken[engine], self._learned[engine].scale
        scale = min(scale, 1 + fresh * (scale - 1))
        for name, value in (("a", curve.a), ("b", curve.b), ("c", curve.c)):
            self._table[name][row] = value * scale


def _first(queue: OrderedDict[str, Queued]) -> str:
    """Under way: of the best class that which came first."""
    return max(queue, key=lambda key: queue[key].ahead_s)


def _seconds(queue: OrderedDict[str, Queued], ahead_s: float = -inf) -> float:
    """Of prompts whose class is worth so much at least."""
    return sum(queued.seconds for queued in queue.values() if queued.ahead_s >= ahead_s)
