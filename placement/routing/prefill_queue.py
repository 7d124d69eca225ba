"""Queues of the prefillers, and the choice of the prefiller that would finish a prompt first.

An engine computes one prompt at a time: those with a higher queue weight first, then in order of arrival.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from placement.engine_table import OPTIONS, EngineTable
from placement.routing.receipts import PrefillerChoice, PrefillerOption, Why
from placement.scheduling.prefill_curve import PrefillCurve

TYPICAL_TOKENS = 8192  # prompt length at which two curves are compared
KEPT_PER_PROMPT = 0.9  # share of the earlier measurements that stays in a correction at each new prompt
HALF_LIFE_S = 20.0  # in which measurements of an engine lose half of their weight while it computes nothing
SLOWEST, FASTEST = 20.0, 0.05  # bounds of the correction
# Surcharge on prefill time when prefillers are compared, which favours a prefiller with a cached prefix.
# Computing a cached prefix again elsewhere, only to end somewhat sooner, delays the prompts that come next.
RECOMPUTE_COST = 0.5
MOST_COMPARED = 32  # prefillers with a cached prefix that are compared: those with the shortest queues


class QueuedPrefill(NamedTuple):
    seconds: float
    placed_at: float
    queue_weight: float


@dataclass(slots=True)
class CurveCorrection:
    """Ratio of the measured time of an engine's prompts to the time that its curve predicts.

    The measured time of a prompt begins when the previous prompt ended, or when the queue began. So the
    sums of these times are right in whatever order the engine computes prompts, even if several together.
    """

    took_s: float = 0.0
    expected_s: float = 0.0
    since: float = 0.0  # when the queue began, or the previous prompt ended
    ended: float = 0.0  # when the previous prompt ended

    def prompt_ended(self, expected_s: float, now: float) -> None:
        kept = KEPT_PER_PROMPT
        if not self.expected_s:
            self.took_s = self.expected_s = expected_s  # the curve counts as much as the first prompt
        else:
            kept *= 0.5 ** (max(0.0, self.since - self.ended) / HALF_LIFE_S)
        self.took_s = kept * self.took_s + max(0.0, now - self.since)
        self.expected_s = kept * self.expected_s + expected_s
        self.since = self.ended = now

    def curve_changed(self, factor: float) -> None:
        """Rescale the ratio after the curve has changed by `factor`."""
        self.expected_s *= factor

    @property
    def ratio(self) -> float:
        return min(max(self.took_s / self.expected_s, FASTEST), SLOWEST) if self.expected_s else 1.0


class PrefillQueues:
    """Queue and prefill curve of every prefiller.

    Column `free_at` is when all queued prompts will be done. Column `behind` is the prefill time of the
    prompts queued behind the running prompt: the least time that is left when the running prompt overruns its
    estimate.
    """

    def __init__(self) -> None:
        # `closed` is infinite where no prompt may be placed, so that adding it excludes the row from a
        # choice.
        self._table = EngineTable(free_at=0.0, behind=0.0, a=0.0, b=0.0, c=0.0, closed=inf)
        self._queues: dict[str, OrderedDict[str, QueuedPrefill]] = {}
        self._engine_of: dict[str, str] = {}  # conversation -> prefiller
        self._weights = Counter[float]()  # queue weight -> number of queued prompts
        self._initial: dict[str, PrefillCurve] = {}  # the curve that the engine was added with
        self._reported: dict[str, PrefillCurve] = {}
        self._estimates: dict[str, tuple[PrefillCurve, float]] = {}  # curve, and freshness (`set_curve`)
        self._corrections: dict[str, CurveCorrection] = {}  # kept when an engine restarts

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, engine: str) -> bool:
        return engine in self._queues

    def add_engine(self, engine: str, curve: PrefillCurve) -> None:
        self._table.add(engine, free_at=-inf, closed=0.0)
        self._queues[engine] = OrderedDict()
        if self._initial.get(engine) != curve:
            self._initial[engine] = self._reported[engine] = curve
            self._corrections[engine] = CurveCorrection()
        self._estimates[engine] = self._reported[engine], 1.0
        self._update_curve_columns(engine)

    def set_curve(
        self, engine: str, reported: PrefillCurve, estimate: PrefillCurve, freshness: float = 1.0
    ) -> None:
        """Store the curve that an engine reports, and the estimate of its current curve.

        The correction learned from the engine's prompts is kept. If it makes the engine slower, only the
        share `freshness` of it counts.
        """
        before, correction = self._reported[engine], self._corrections[engine]
        if reported != before:
            correction.curve_changed(reported.seconds(TYPICAL_TOKENS) / before.seconds(TYPICAL_TOKENS))
            self._reported[engine] = reported
        self._estimates[engine] = estimate, freshness
        self._update_curve_columns(engine)

    def remove_engine(self, engine: str) -> tuple[str, ...]:
        """Remove an engine, and return the conversations whose prefill was queued there."""
        self._table.remove(engine)
        lost = self._queues.pop(engine)
        for key, queued in lost.items():
            del self._engine_of[key]
            self._uncount(queued)
        return tuple(lost)

    def set_draining(self, engine: str, draining: bool) -> None:
        self._table["closed"][self._table.row(engine)] = inf if draining else 0.0

    def open_count(self) -> int:
        """Return how many engines accept prompts."""
        return int(np.count_nonzero(self._table["closed"] == 0.0))

    def mean_prefill_s(self, tokens: int) -> float | None:
        """Return the mean prefill time of `tokens` over the open engines, or None if no engine is open."""
        open_, table = self._table["closed"] == 0.0, self._table
        if not open_.any():
            return None
        return float((table["a"] + table["b"] * tokens + table["c"] * tokens * tokens)[open_].mean())

    def shortest_wait_s(self, now: float) -> float:
        """Return the wait in the shortest queue, or 0 if no engine accepts prompts."""
        wait = np.maximum(self._table["free_at"] - now, self._table["behind"])[self._table["closed"] == 0.0]
        return max(0.0, float(wait.min())) if wait.size else 0.0

    def choose(self, tokens: int, now: float, queue_weight: float = 0.0) -> PrefillerChoice | None:
        """Return the prefiller that would finish `tokens` first, or None if no prefiller accepts prompts."""
        table = self._table
        # In place where possible: at a thousand rows creating an array costs as much as the sum in it.
        wait = table["free_at"] - now
        np.maximum(wait, table["behind"], out=wait)  # `behind` is never below zero
        if self._overtakes_some(queue_weight):
            for engine in filter(self._queues.get, self._queues):
                wait[table.row(engine)] = self.wait_s(engine, now, queue_weight)
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

    def prefer_cached(
        self,
        choice: PrefillerChoice,
        tokens: int,
        cached: Mapping[str, int],
        now: float,
        queue_weight: float,
    ) -> PrefillerChoice:
        """Return `choice`, or a choice of a prefiller that has a prefix cached and finishes about as soon.

        `cached` maps engines to the tokens of the prompt that they have cached.
        """
        best = choice.chosen
        if best is None:
            return choice
        for engine in self._shortest_queues(cached, MOST_COMPARED, now):
            option = self.option(engine, tokens, now, cached[engine], queue_weight)
            if option is not None and _cost(option) < _cost(best):
                best = option
        return choice if best is choice.chosen else choice.replaced(best, Why.HAS_PREFIX)

    def _shortest_queues(self, engines: Iterable[str], count: int, now: float) -> list[str]:
        """Return the prefillers among `engines`, at most the `count` with the shortest queues."""
        names = [name for name in engines if name in self._queues]
        if len(names) <= count:
            return names
        rows = [self._table.row(name) for name in names]
        waits = np.maximum(self._table["free_at"][rows] - now, self._table["behind"][rows])
        waits += self._table["closed"][rows]
        return [names[index] for index in np.argpartition(waits, count)[:count]]

    def option(
        self, engine: str, tokens: int, now: float, cached: int = 0, queue_weight: float = 0.0
    ) -> PrefillerOption | None:
        """Return the option to compute `tokens` on this prefiller, or None if it accepts no prompts.

        `cached` is how many of the tokens the prefiller has in its cache.
        """
        if engine not in self._queues or self._table["closed"][self._table.row(engine)]:
            return None
        row, table = self._table.row(engine), self._table
        seconds = table["a"][row] + tokens * (table["b"][row] + tokens * table["c"][row])
        seconds -= cached * (table["b"][row] + cached * table["c"][row])
        return PrefillerOption(engine, self.wait_s(engine, now, queue_weight), float(seconds), cached)

    def enqueue(self, engine: str, key: str, seconds: float, now: float, queue_weight: float = 0.0) -> None:
        self.dequeue(key, now)  # a conversation placed again leaves its old queue
        row, queue = self._table.row(engine), self._queues[engine]
        self._engine_of[key] = engine
        self._weights[queue_weight] += 1
        if not queue:
            self._table["free_at"][row] = now + seconds
            self._corrections[engine].since = now
            queue[key] = QueuedPrefill(seconds, now, queue_weight)
            return
        self._table["free_at"][row] = now + self.wait_s(engine, now) + seconds
        queue[key] = QueuedPrefill(seconds, now, queue_weight)
        if _running_prompt(queue) == key:  # it overtakes the running prompt, and has all others behind it
            self._table["behind"][row] = _queued_seconds(queue) - seconds
        else:
            self._table["behind"][row] += seconds

    def prefill_ended(self, key: str, tokens: int, now: float, cached: int = 0) -> None:
        """Correct the engine's prefill curve by a prefill that ended, and remove its prompt from the queue.

        `tokens` is the length of the prompt, or 0 if the prefiller did not compute it, and `cached` is how
        many of them the prefiller had in its cache.
        """
        engine = self._engine_of.get(key)
        if engine is not None and tokens:
            curve = self._reported[engine]
            seconds = curve.seconds(tokens) - (curve.seconds(cached) - curve.a if cached else 0.0)
            self._corrections[engine].prompt_ended(seconds, now)
            self._estimates[engine] = curve, 1.0
            self._update_curve_columns(engine)
        self.dequeue(key, now)

    def dequeue(self, key: str, now: float) -> None:
        """Remove a prompt from its queue, because its prefill ended or will never run."""
        engine = self._engine_of.pop(key, None)
        if engine is None:
            return
        row, queue = self._table.row(engine), self._queues[engine]
        was_running = key == _running_prompt(queue)
        seconds = self._uncount(queue.pop(key)).seconds
        if not was_running:
            self._table["behind"][row] = max(0.0, self._table["behind"][row] - seconds)
            self._table["free_at"][row] -= seconds
        elif queue:
            following = _queued_seconds(queue)
            self._table["free_at"][row] = now + following
            self._table["behind"][row] = max(0.0, following - queue[_running_prompt(queue)].seconds)
        else:
            self._table["free_at"][row] = now
            self._table["behind"][row] = 0.0

    def drop_placed_before(self, engine: str, before: float, now: float) -> None:
        """Remove prompts placed before `before` from an idle engine's queue; their end was not reported."""
        for key in [k for k, queued in self._queues[engine].items() if queued.placed_at < before]:
            self.dequeue(key, now)

    def wait_s(self, engine: str, now: float, queue_weight: float = -inf) -> float:
        """Return how long a prompt with this queue weight would wait; by default behind all prompts."""
        row = self._table.row(engine)
        wait_s = float(max(self._table["free_at"][row] - now, self._table["behind"][row], 0.0))
        if not self._overtakes_some(queue_weight):
            return wait_s
        return min(wait_s, _queued_seconds(self._queues[engine], queue_weight))

    def _overtakes_some(self, queue_weight: float) -> bool:
        """Return whether a prompt with this weight would overtake a queued prompt of any prefiller."""
        return any(weight < queue_weight for weight in self._weights)

    def _uncount(self, queued: QueuedPrefill) -> QueuedPrefill:
        self._weights[queued.queue_weight] -= 1
        if not self._weights[queued.queue_weight]:
            del self._weights[queued.queue_weight]
        return queued

    def _update_curve_columns(self, engine: str) -> None:
        """Write the coefficients of the engine's current curve estimate into the table."""
        row, (curve, freshness) = self._table.row(engine), self._estimates[engine]
        ratio = self._corrections[engine].ratio
        ratio = min(ratio, 1 + freshness * (ratio - 1))
        for name, value in (("a", curve.a), ("b", curve.b), ("c", curve.c)):
            self._table[name][row] = value * ratio


def _running_prompt(queue: OrderedDict[str, QueuedPrefill]) -> str:
    """Return the key of the prompt assumed to be running: the oldest of those with the highest weight."""
    return max(queue, key=lambda key: queue[key].queue_weight)


def _queued_seconds(queue: OrderedDict[str, QueuedPrefill], min_weight: float = -inf) -> float:
    """Return the total prefill time of the queued prompts whose weight is at least `min_weight`."""
    return sum(queued.seconds for queued in queue.values() if queued.queue_weight >= min_weight)


def _cost(option: PrefillerOption) -> float:
    """Return the seconds until the prefill ends, with a surcharge on its duration (`RECOMPUTE_COST`)."""
    return option.wait_s + (1 + RECOMPUTE_COST) * option.prefill_s
