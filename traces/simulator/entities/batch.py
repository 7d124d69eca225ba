"""The running batch of an engine, advanced many iterations at a time.

While nobody joins or leaves, iteration i of n decoding rows costs `first + i * growth`: every row's context
is one token longer than before. So any number of iterations has a closed sum, any time has a closed inverse,
and an event is needed only when the batch changes.
"""

from heapq import heappop, heappush
from math import ceil, sqrt

from placement.latency import LatencyModel
from traces.simulator.entities.live import Live


class Batch:
    def __init__(self, model: LatencyModel) -> None:
        self._constant = model.constant
        self._per_token = model.per_token
        self._per_attended = model.per_attended
        self._per_context = model.per_context
        self._per_before = model.per_before
        self._per_row = model.per_row
        # A decoding row computes one token on top of its context and reads both.
        self._per_read = model.per_attended + model.per_context + model.per_before
        self._per_decoding = model.per_token + model.per_row - model.per_before
        self.rows = 0
        self.context = 0  # of all rows, at the boundary before the next iteration
        self.iteration = 0
        self._joins = 0
        self._ends: list[tuple[int, int, int, Live]] = []  # iteration, order of joining, visit

    def join(self, live: Live) -> None:
        live.joined = self.iteration
        live.visit += 1
        self.rows += 1
        self.context += live.context
        self._joins += 1
        heappush(self._ends, (self.iteration + live.left, self._joins, live.visit, live))

    def leave(self, live: Live) -> None:
        """Out of the batch before its end; what it has decoded stays in its context."""
        decoded = self.iteration - live.joined
        live.context += decoded
        live.left -= decoded
        live.visit += 1
        self.rows -= 1
        self.context -= live.context

    def youngest(self) -> Live:
        """The row that joined last: it has the least to lose."""
        return max((e for e in self._ends if e[2] == e[3].visit), key=lambda e: e[1])[3]

    def until_an_end(self) -> int:
        """Iterations until some row has decoded its last token."""
        ends = self._ends
        while ends[0][2] != ends[0][3].visit:
            heappop(ends)
        return ends[0][0] - self.iteration

    def advance(self, iterations: int) -> list[Live]:
        """Let every row decode that many tokens; returns those that are done, out of the batch."""
        self.iteration += iterations
        self.context += self.rows * iterations
        done: list[Live] = []
        ends = self._ends
        while ends and (ends[0][0] <= self.iteration or ends[0][2] != ends[0][3].visit):
            _, _, visit, live = heappop(ends)
            if visit == live.visit:
                self.leave(live)
                done.append(live)
        return done

    def seconds(self, iterations: int) -> float:
        """Of the next iterations, when only decoding."""
        first = self._constant + self._per_decoding * self.rows + self._per_read * (self.context + self.rows)
        growth = self._per_read * self.rows
        return iterations * (first + growth * (iterations - 1) / 2)

    def iterations_in(self, seconds: float) -> int:
        """The fewest iterations that take at least that long: the boundary that comes next."""
        first = self._constant + self._per_decoding * self.rows + self._per_read * (self.context + self.rows)
        half = self._per_read * self.rows / 2
        linear = first - half
        guess = max(1, ceil(2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds))))
        # The root is rounded; the sum itself decides on which side of it the boundary lies.
        while guess > 1 and self.seconds(guess - 1) >= seconds:
            guess -= 1
        while self.seconds(guess) < seconds:
            guess += 1
        return guess

    def prefill_seconds(self, chunks: list[tuple[Live, int]]) -> float:
        """What computing these chunks adds to one iteration."""
        seconds = 0.0
        for live, tokens in chunks:
            end = live.context + tokens
            seconds += tokens * (self._per_token + self._per_attended * end + self._per_before * live.context)
            seconds += self._per_context * end + self._per_row
        return seconds
