"""Choose the prefiller that would finish first: what is queued on it, plus the curve at this prompt."""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

import numpy as np

from placement.curve import PrefillCurve
from placement.receipt import PrefillerChoice, PrefillerOption, Why
from placement.table import EngineTable

RUNNERS_UP = 3


@dataclass(frozen=True, slots=True)
class _Queued:
    seconds: float
    placed_at: float


class Prefillers:
    """Queues of the prefillers as the placer knows them: first come, first served, one prompt at a time.

    Column `free_at` is when all that is queued will be done; `behind` is the seconds queued after the prompt
    that is running: when that one overruns its estimate, at least those are still to come.
    """

    def __init__(self) -> None:
        # `closed` is infinite where no work may be placed, so that adding it takes the row out of a choice.
        self._table = EngineTable(free_at=0.0, behind=0.0, a=0.0, b=0.0, c=0.0, closed=inf)
        self._queues: dict[str, OrderedDict[str, _Queued]] = {}
        self._where: dict[str, str] = {}  # conversation -> prefiller

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, engine: str) -> bool:
        return engine in self._queues

    def add(self, engine: str, curve: PrefillCurve) -> None:
        self._table.add(engine, a=curve.a, b=curve.b, c=curve.c, free_at=-inf, closed=0.0)
        self._queues[engine] = OrderedDict()

    def remove(self, engine: str) -> tuple[str, ...]:
        """Forget an engine; returns the conversations whose prefill was queued there."""
        self._table.remove(engine)
        lost = tuple(self._queues.pop(engine))
        for key in lost:
            del self._where[key]
        return lost

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

    def choose(self, tokens: int, now: float) -> PrefillerChoice | None:
        """The prefiller that would finish `tokens` first; None when none takes work."""
        table = self._table
        # In place where it can be: at a thousand rows an array that is made costs as much as the sum in it.
        wait = table["free_at"] - now
        np.maximum(wait, table["behind"], out=wait)  # `behind` is never below zero
        prefill = table["c"] * tokens
        prefill += table["b"]
        prefill *= tokens
        prefill += table["a"]
        finish = wait + prefill
        finish += table["closed"]
        options: list[PrefillerOption] = []
        while len(options) <= RUNNERS_UP:
            row = int(finish.argmin())
            if finish.item(row) == inf:
                break
            finish[row] = inf
            options.append(PrefillerOption(table.name(row), wait.item(row), prefill.item(row)))
        if not options:
            return None
        return PrefillerChoice(Why.FINISHES_FIRST, options[0], tuple(options[1:]), len(self._queues))

    def enqueue(self, engine: str, key: str, seconds: float, now: float) -> None:
        self.done(key, now)  # a conversation placed again leaves its old queue
        row, queue = self._table.row(engine), self._queues[engine]
        if queue:
            self._table["free_at"][row] = now + self.wait_s(engine, now) + seconds
            self._table["behind"][row] += seconds
        else:
            self._table["free_at"][row] = now + seconds
        queue[key] = _Queued(seconds, now)
        self._where[key] = engine

    def done(self, key: str, now: float) -> None:
        """A prefill ended, or will never run."""
        engine = self._where.pop(key, None)
        if engine is None:
            return
        row, queue = self._table.row(engine), self._queues[engine]
        was_running = key == next(iter(queue))
        seconds = queue.pop(key).seconds
        if not was_running:
            self._table["behind"][row] = max(0.0, self._table["behind"][row] - seconds)
            self._table["free_at"][row] -= seconds
        elif queue:
            following = sum(queued.seconds for queued in queue.values())
            self._table["free_at"][row] = now + following
            self._table["behind"][row] = max(0.0, following - next(iter(queue.values())).seconds)
        else:
            self._table["free_at"][row] = now
            self._table["behind"][row] = 0.0

    def forget_placed_before(self, engine: str, before: float, now: float) -> None:
        """The engine says it has nothing to do: the ends of what was placed before then were not reported."""
        for key in [k for k, queued in self._queues[engine].items() if queued.placed_at < before]:
            self.done(key, now)

    def wait_s(self, engine: str, now: float) -> float:
        row = self._table.row(engine)
        return float(max(self._table["free_at"][row] - now, self._table["behind"][row], 0.0))

    def queued(self, engine: str) -> int:
        return len(self._queues[engine])
