"""Advances the decoding turns of a simulated engine many iterations at a time, and counts token gaps."""

from __future__ import annotations

from array import array
from heapq import heappop, heappush
from math import ceil, sqrt

import numpy as np

from placement.scheduling.latency_model import BatchWork, LatencyModel
from traces.simulator.kv import LiveConversation


class Gaps:
    """Distribution of the times between single tokens. Unlike a turn's mean TBT, it shows single stalls."""

    def __init__(self) -> None:
        self._seconds = array("f")
        self._tokens = array("l")

    def add(self, seconds: float, tokens: int) -> None:
        """Count `tokens` gaps of `seconds` each, the mean gap while the batch was unchanged."""
        self._seconds.append(seconds)
        self._tokens.append(tokens)

    def percentile(self, p: float) -> float:
        if not self._tokens:
            return float("nan")
        order = np.argsort(np.asarray(self._seconds), kind="stable")
        counted = np.cumsum(np.asarray(self._tokens)[order])
        at = int(np.searchsorted(counted, counted[-1] * p / 100.0))
        return float(np.asarray(self._seconds)[order[min(at, len(order) - 1)]])

    def share_above(self, seconds: float) -> float:
        tokens = np.asarray(self._tokens)
        return float(tokens[np.asarray(self._seconds) > seconds].sum() / tokens.sum())


class Iteration:
    """Batch of decoding turns, which advances many iterations at a time.

    While no turn joins or leaves, iteration i takes `first + i * growth`, because every context is one token
    longer than before. So there is a formula for the time of any number of iterations, and for its inverse,
    and an event is needed only when the batch changes.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._constant = model.constant
        self._per_token = model.per_token
        self._per_attended = model.per_attended
        self._per_context = model.per_context
        self._per_before = model.per_before
        self._per_request = model.per_request
        # A decoding turn computes one token on top of its context and reads both.
        self._per_read = model.per_attended + model.per_context + model.per_before
        self._per_decoding = model.per_token + model.per_request - model.per_before
        self.turns = 0
        self.context = 0  # tokens of all turns' contexts before the next iteration
        self.iteration = 0
        self._joins = 0
        self._ends: list[tuple[int, int, int, LiveConversation]] = []  # iteration, order of joining, visit

    def join(self, live: LiveConversation) -> None:
        live.joined = self.iteration
        live.visit += 1
        self.turns += 1
        self.context += live.context
        self._joins += 1
        heappush(self._ends, (self.iteration + live.left, self._joins, live.visit, live))

    def leave(self, live: LiveConversation) -> None:
        """Remove a turn from the batch. The tokens that it has decoded stay in its context."""
        decoded = self.iteration - live.joined
        live.context += decoded
        live.left -= decoded
        live.visit += 1
        self.turns -= 1
        self.context -= live.context

    def youngest(self) -> LiveConversation:
        """Return the turn that joined last, which loses least if it is preempted."""
        return max((e for e in self._ends if e[2] == e[3].visit), key=lambda e: e[1])[3]

    def all(self) -> list[LiveConversation]:
        return [live for _, _, visit, live in self._ends if visit == live.visit]

    def until_an_end(self) -> int:
        """Return how many iterations pass until a turn decodes its last token."""
        ends = self._ends
        while ends[0][2] != ends[0][3].visit:
            heappop(ends)
        return ends[0][0] - self.iteration

    def advance(self, iterations: int) -> list[LiveConversation]:
        """Let every turn decode `iterations` tokens; remove finished turns and return them."""
        self.iteration += iterations
        self.context += self.turns * iterations
        done: list[LiveConversation] = []
        ends = self._ends
        while ends and (ends[0][0] <= self.iteration or ends[0][2] != ends[0][3].visit):
            _, _, visit, live = heappop(ends)
            if visit == live.visit:
                self.leave(live)
                done.append(live)
        return done

    def seconds(self, iterations: int) -> float:
        """Return how long the next `iterations` take together if they compute no prompt."""
        first = (
            self._constant + self._per_decoding * self.turns + self._per_read * (self.context + self.turns)
        )
        growth = self._per_read * self.turns
        return iterations * (first + growth * (iterations - 1) / 2)

    def iterations_in(self, seconds: float) -> int:
        """Return the smallest number of iterations that take at least `seconds` together."""
        first = (
            self._constant + self._per_decoding * self.turns + self._per_read * (self.context + self.turns)
        )
        half = self._per_read * self.turns / 2
        linear = first - half
        guess = max(1, ceil(2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds))))
        # The root is rounded, so compare the sums themselves.
        while guess > 1 and self.seconds(guess - 1) >= seconds:
            guess -= 1
        while self.seconds(guess) < seconds:
            guess += 1
        return guess

    @property
    def work(self) -> BatchWork:
        """Return the work of the next iteration if it computes no prompt."""
        read = self.context + self.turns
        return BatchWork(self.turns, read, read, self.context, self.turns)

    def prefill_seconds(self, chunks: list[tuple[LiveConversation, int]]) -> float:
        """Return by how many seconds these chunks of prompts prolong one iteration."""
        seconds = 0.0
        for live, tokens in chunks:
            end = live.context + tokens
            seconds += tokens * (self._per_token + self._per_attended * end + self._per_before * live.context)
            seconds += self._per_context * end + self._per_request
        return seconds
