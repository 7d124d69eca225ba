"""Simulated engine: iterations over prompts and decoding turns, on a clock of events."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import ceil, sqrt
from typing import Any

import numpy as np

from placement.iteration.latency import BatchWork, LatencyModel
from placement.iteration.prompts import PromptRate, PromptSharing
from traces.simulator.kv import KvStore, Link, LiveConversation, Pressure
from traces.simulator.tiers import EngineProfile


class EventQueue:
    """What happens next; at one instant in the order of scheduling, so that runs repeat exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        self._scheduled += 1
        heappush(self._heap, (time, self._scheduled, action, argument))

    def run(self, until: float = float("inf")) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, argument = heappop(heap)
            self.handled += 1
            action(argument)


class Gaps:
    """Times between single tokens. A turn's mean TBT hides an iteration that stalled; this does not."""

    def __init__(self) -> None:
        self._seconds = array("f")
        self._tokens = array("l")

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens came after so long each: the mean of a phase in which the batch did not change."""
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
    """Batch of an engine, advanced many iterations at a time.

    While nobody joins or leaves, iteration i of n decoding turns costs `first + i * growth`: every context is
    one token longer than before. So any number of iterations has a closed sum, any time has a closed inverse,
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
        self.context = 0  # of all turns, at the boundary before the next iteration
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
        """Out of the batch before its end; what it has decoded stays in its context."""
        decoded = self.iteration - live.joined
        live.context += decoded
        live.left -= decoded
        live.visit += 1
        self.turns -= 1
        self.context -= live.context

    def youngest(self) -> LiveConversation:
        """The turn that joined last: it has the least to lose."""
        return max((e for e in self._ends if e[2] == e[3].visit), key=lambda e: e[1])[3]

    def until_an_end(self) -> int:
        """Iterations until some turn has decoded its last token."""
        ends = self._ends
        while ends[0][2] != ends[0][3].visit:
            heappop(ends)
        return ends[0][0] - self.iteration

    def advance(self, iterations: int) -> list[LiveConversation]:
        """Let every turn decode that many tokens; returns those that are done, out of the batch."""
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
        """Of the next iterations, when only decoding."""
        first = (
            self._constant + self._per_decoding * self.turns + self._per_read * (self.context + self.turns)
        )
        growth = self._per_read * self.turns
        return iterations * (first + growth * (iterations - 1) / 2)

    def iterations_in(self, seconds: float) -> int:
        """The fewest iterations that take at least that long: the boundary that comes next."""
        first = (
            self._constant + self._per_decoding * self.turns + self._per_read * (self.context + self.turns)
        )
        half = self._per_read * self.turns / 2
        linear = first - half
        guess = max(1, ceil(2 * seconds / (linear + sqrt(linear * linear + 4 * half * seconds))))
        # The root is rounded; the sum itself decides on which side of it the boundary lies.
        while guess > 1 and self.seconds(guess - 1) >= seconds:
            guess -= 1
        while self.seconds(guess) < seconds:
            guess += 1
        return guess

    @property
    def work(self) -> BatchWork:
        """Of the next iteration, when only decoding."""
        read = self.context + self.turns
        return BatchWork(self.turns, read, read, self.context, self.turns)

    def prefill_seconds(self, chunks: list[tuple[LiveConversation, int]]) -> float:
        """What computing these chunks adds to one iteration."""
        seconds = 0.0
        for live, tokens in chunks:
            end = live.context + tokens
            seconds += tokens * (self._per_token + self._per_attended * end + self._per_before * live.context)
            seconds += self._per_context * end + self._per_request
        return seconds


MAX_TURNS = 256  # vLLM's max_num_seqs
OnLive = Callable[["SimulatedEngine", LiveConversation], None]


class SimulatedEngine:
    """An iteration that decodes, prompts in chunks beside it, first come first served, and its KV.

    Calls `on_finished` when a turn has decoded its last token.

    A turn that is to decode nothing here (`left` is 0) is a prefill leg: `on_prefilled` when it is computed.
    """

    def __init__(
        self,
        name: str,
        profile: EngineProfile,
        events: EventQueue,
        pressure: Pressure,
        on_prefilled: OnLive,
        on_finished: OnLive,
    ) -> None:
        self.name = name
        self.profile = profile
        self.kv = KvStore(profile.kv_tokens, pressure)
        self.network = Link(profile.network_bytes_per_s)
        self.host = Link(profile.host_bytes_per_s)
        self.waiting: deque[LiveConversation] = deque()
        self.batch = Iteration(profile.latency)
        self.prefilled = self.decoded = self.recomputed = 0  # tokens
        self.preempted = 0  # times
        self.restoring = 0  # turns on their way back
        self.idle_s = self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.gaps = Gaps()  # of all engines, in a simulation
        self.prompts: PromptSharing | None = None  # None: first come, first served, in whole chunks
        self.on_free: Callable[[SimulatedEngine], None] | None = None  # its last waiting prompt is computed
        self._prompt_rate = PromptRate()
        self._events = events
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._began = 0.0
        self._iterations = 0  # of the phase under way; 0 when idle
        self._chunks: list[tuple[LiveConversation, int]] = []
        self._phase = 0  # an event of an earlier phase is void
        self._between = False

    @property
    def running(self) -> int:
        return self.batch.turns

    @property
    def idle(self) -> bool:
        return self._iterations == 0

    def submit(self, live: LiveConversation) -> None:
        """A turn to compute (`todo` tokens behind `context`) and then to decode (`left` tokens)."""
        self.waiting.append(live)
        if self._between:
            return
        if self.idle:
            self._begin()
        elif not self._chunks:
            self._join_at_next_boundary()

    def withdraw(self, live: LiveConversation) -> bool:
        """Take a waiting turn back; False when it has begun, or is not here yet."""
        if live.begun or live not in self.waiting:
            return False
        self.waiting.remove(live)
        return True

    def waiting_prompt_tokens(self) -> int:
        return sum(live.todo for live in self.waiting)

    def prompt_tokens_per_s(self) -> float:
        return self._prompt_rate.tokens_per_s

    def prompt_share(self) -> float:
        """Of its time, what running turns leave to prompts."""
        if self.prompts is None or not self.batch.turns:
            return 1.0
        return self.prompts.share(self.batch.seconds(1))

    def place_was_made(self) -> None:
        """KV was released from outside; what waits for it may go on."""
        if self.idle and self.waiting and not self._between:
            self._begin()

    def seconds_until(self, horizon: float) -> tuple[float, float, float]:
        """Seconds idle (or stalled, which draws the same), decoding and prefilling."""
        trailing = horizon - self._began if self.idle else 0.0
        return self.idle_s + trailing + self.stalled_s, self.decode_s, self.prefill_s

    def joules(self, horizon: float) -> float:
        return self.profile.power.joules(*self.seconds_until(horizon))

    def _join_at_next_boundary(self) -> None:
        elapsed = self._events.now - self._began
        iterations = self.batch.iterations_in(elapsed) if elapsed > 0 else 1
        if iterations < self._iterations:
            self._schedule(iterations, self.batch.seconds(iterations))

    def _begin(self) -> None:
        """Plan the next phase: one iteration with prompts in it, or decoding until something ends."""
        now, batch = self._events.now, self.batch
        if self.idle:
            self.idle_s += now - self._began
        self._began = now
        self._make_place_for_one_token_each()
        self._chunks = self._next_chunks()
        if self._chunks:
            adds = batch.prefill_seconds(self._chunks)
            base = batch.seconds(1)
            stall = sum(live.stall_s for live, _ in self._chunks)
            self.prefill_s += adds if batch.turns else adds + base
            self.decode_s += base if batch.turns else 0.0
            self.stalled_s += stall
            self._schedule(1, base + adds + stall)
        elif batch.turns:
            fits = max(1, self.kv.free // batch.turns)
            iterations = min(batch.until_an_end(), fits)
            self._schedule(iterations, batch.seconds(iterations))
        else:
            self._iterations = 0

    def _next_chunks(self) -> list[tuple[LiveConversation, int]]:
        """Prompts for one iteration, as many tokens as the budget and the KV allow: in the policy's order,
        else oldest first.
        """
        sharing, model, work = self.prompts, self.profile.latency, self.batch.work
        budget, decoding_s = self.profile.chunk_tokens - self.batch.turns, self.batch.seconds(1)
        if sharing is not None and self.waiting:
            budget = sharing.chunk(model, budget)
            self.waiting = deque(sorted(self.waiting, key=self._due))
        chunks: list[tuple[LiveConversation, int]] = []
        for live in tuple(self.waiting):
            if budget <= 0 or self.batch.turns + len(chunks) >= MAX_TURNS:
                break
            if live not in self.waiting:
                continue  # it gave way to one before it
            if live.left and not self._hold_prompt_of(live, alone=not chunks):
                if sharing is None:
                    break
                continue  # a shorter one may be held already
            tokens = min(live.todo, budget)
            if sharing is not None:
                if self.batch.turns:
                    tokens = sharing.tokens(model, work, decoding_s, live.context, tokens)
                if chunks and tokens < live.todo and self._due(live) > self._events.now:
                    break  # those before it end now, and wait for a part of it only if that is overdue
                tokens = max(tokens, 1)
                work = work.plus(tokens, live.context)
            budget -= tokens
            live.begun = True
            chunks.append((live, tokens))
            if tokens < live.todo:
                break
        return chunks

    def _due(self, live: LiveConversation) -> float:
        assert self.prompts is not None
        return self.prompts.due(self.profile.latency, live.turn_at, live.todo, live.context)

    def _hold_prompt_of(self, live: LiveConversation, alone: bool) -> bool:
        """Take the KV a prompt lacks. A prefill leg holds nothing here: its KV is the decoder's."""
        missing = live.context + live.todo - live.held
        if missing <= 0:
            return True
        available = self.kv.free + self.kv.yielding - self.batch.turns
        if alone and (self.kv.pressure is not Pressure.PIN or not self.batch.turns):
            # A turn that only waits has no claim on KV: those behind the first give way to it. What is
            # pinned does so only when nothing runs, for then nothing would end.
            for behind in reversed(tuple(self.waiting)):
                if available >= missing or behind is live:
                    break
                if not behind.left:
                    continue  # a prefill leg: what it holds is its decoder's
                available += behind.held
                self._give_way(behind)
        if missing > available:
            return False
        self.kv.take(missing)
        live.held += missing
        return True

    def _make_place_for_one_token_each(self) -> None:
        batch, kv = self.batch, self.kv
        if kv.free >= batch.turns:
            return
        kv.make_place(batch.turns)
        while kv.free < batch.turns and batch.turns > 1:
            youngest = batch.youngest()
            batch.leave(youngest)
            youngest.held = youngest.context
            youngest.todo, youngest.context = 1, youngest.context - 1  # a resumed turn computes a token
            self.recomputed += 1
            self.waiting.appendleft(youngest)
            self._give_way(youngest)
            self.preempted += 1
        # The last turn alone does not fit beside what is pinned: a pin that stops everything helps nobody.
        kv.make_place(batch.turns, even_pinned=True)

    def _give_way(self, live: LiveConversation) -> None:
        """A waiting turn gives its KV up. With parking it is on the host, block by block as they filled."""
        if self.kv.pressure is not Pressure.PARK:
            self.kv.lose(live)
            self.recomputed += live.context
            live.todo += live.context
            live.context = 0
        elif live.held:
            self.kv.resident -= live.held
            live.held = 0
            self.waiting.remove(live)
            self.restoring += 1
            back = self.host.send(live.context * self.profile.kv_bytes_per_token, self._events.now)
            self._events.at(back, self._restored, live)

    def _restored(self, live: Any) -> None:
        self.restoring -= 1
        self.submit(live)

    def _schedule(self, iterations: int, seconds: float) -> None:
        self._iterations = iterations
        self._phase += 1
        self._events.at(self._began + seconds, self._end, self._phase)

    def _end(self, phase: Any) -> None:
        if phase != self._phase:
            return
        batch, chunks = self.batch, self._chunks
        if not chunks:
            self.decode_s += self._events.now - self._began
        if batch.turns:
            seconds = (self._events.now - self._began) / self._iterations
            self.gaps.add(seconds, batch.turns * self._iterations)
        if chunks:
            tokens = sum(tokens for _, tokens in chunks)
            self._prompt_rate.see(tokens, self._events.now - self._began)
        self._between = True
        grown = batch.turns * self._iterations
        self.decoded += grown
        self.kv.resident += grown
        finished = batch.advance(self._iterations)
        for live in finished:
            self._finish(live)
        for live, tokens in chunks:
            self.prefilled += tokens
            live.todo -= tokens
            live.context += tokens
            live.stall_s = 0.0
            if live.todo == 0:
                self.waiting.remove(live)
                self._emit_first_token(live)
        if chunks and not self.waiting and self.on_free is not None:
            self.on_free(self)
        self._between = False
        self._begin()

    def _emit_first_token(self, live: LiveConversation) -> None:
        """The last prompt token gives the first output token, or hands a prefill leg over."""
        if not live.left:
            self._on_prefilled(self, live)
            return
        if not live.first_token_at:  # a preempted turn has had its first
            live.first_token_at = self._events.now
        self.decoded += 1
        live.left -= 1
        if live.left:
            self.batch.join(live)
        else:
            self._finish(live)

    def _finish(self, live: LiveConversation) -> None:
        live.held = live.context
        self._on_finished(self, live)
