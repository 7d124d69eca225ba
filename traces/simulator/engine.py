"""Simulates an engine: iterations over prompts and decoding turns, driven by a queue of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from placement.scheduling.latency_model import BatchWork
from placement.scheduling.prompt_order import PromptRate, PromptSharing
from traces.simulator.batch import Gaps, Iteration
from traces.simulator.kv import KvStore, Link, LiveConversation, Pressure
from traces.simulator.tiers import EngineProfile

QUEUES_S = 1.0  # a turn that waits longer counts as queued


class EventQueue:
    """Queue of events. Simultaneous events run in the order of scheduling, so that runs repeat exactly."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def at(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        self._scheduled += 1
        heappush(self._heap, (time, self._scheduled, action, argument))

    @property
    def more(self) -> bool:
        """Return whether an event is still pending."""
        return bool(self._heap)

    def run(self, until: float = float("inf")) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, action, argument = heappop(heap)
            self.handled += 1
            action(argument)


OnLive = Callable[["SimulatedEngine", LiveConversation], None]


class Pipeline(Protocol):
    """Group of engines that share the layers of one model and step together."""

    def ready(self, engine: SimulatedEngine) -> None:
        """Record that an engine is idle; the group's next round then gives each idle member an iteration."""


class Regrouping(NamedTuple):
    """Change of an engine that drops or restores parameters, made when its current iteration ends."""

    pipeline: Pipeline | None
    kv_tokens: int
    exchange_s: float  # how long running turns stand still because their KV is on its way


class SimulatedEngine:
    """An engine that decodes a batch, computes prompts in chunks beside it, and holds KV.

    Prompts are computed in the order of arrival, or in the order of `prompts` if it is set. `on_finished` is
    called when a turn has decoded its last token. A turn that decodes nothing here (`left` is 0) is a prefill
    leg: `on_prefilled` is called when its prompt is computed.
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
        self.preempted = 0  # number of preemptions
        self.restoring: list[LiveConversation] = []  # turns whose KV is on its way back from the host
        self.idle_s = self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.gaps = Gaps()  # a simulation gives all engines the same object
        self.prompts: PromptSharing | None = None  # None: first come, first served, in whole chunks
        self.on_changed: Callable[[str], None] | None = None  # called when its report would differ
        self._prompt_rate = PromptRate()
        self._events = events
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._began = 0.0
        self._iterations = 0  # of the phase under way; 0 when idle
        self._chunks: list[tuple[LiveConversation, int]] = []
        self._phase = 0  # an event of an earlier phase is void
        self._between = False
        self.pipeline: Pipeline | None = None  # while layers are shared
        self._regrouping: Regrouping | None = None
        self._back: list[LiveConversation] = []  # turns that stood still and go on after this iteration
        self._paused = False

    @property
    def running(self) -> int:
        return self.batch.turns

    @property
    def idle(self) -> bool:
        return self._iterations == 0

    def submit(self, live: LiveConversation) -> None:
        """Queue a turn that computes `todo` tokens after `context`, and then decodes `left` tokens."""
        self.waiting.append(live)
        if self.on_changed is not None:
            self.on_changed(self.name)
        self._soon()

    def _soon(self) -> None:
        """Make the engine plan again when its current iteration ends."""
        if self._between:
            return
        if self.idle:
            self._begin()
        elif not self._chunks and self.pipeline is None:
            self._join_at_next_boundary()

    def regroup(self, change: Regrouping) -> None:
        """Change the engine's pipeline and the size of its KV when its current iteration ends."""
        self._regrouping = change
        self._soon()

    def turns_that_queue(self) -> int:
        """Return how many turns have waited for more than `QUEUES_S` and are in no iteration now."""
        computed, before = {live.key for live, _ in self._chunks}, self._events.now - QUEUES_S
        return sum(live.turn_at < before and live.key not in computed for live in self.waiting)

    def waiting_prompt_tokens(self) -> int:
        return sum(live.todo for live in self.waiting)

    def waiting_kv_tokens(self) -> int:
        """Return how many tokens of KV waiting turns lack here. A prefill leg's KV counts on its decoder."""
        there = sum(max(0, one.context + one.todo - one.held) for one in self.waiting if one.left)
        return there + sum(one.context + one.todo for one in self.restoring)

    def prompt_tokens_per_s(self) -> float:
        return self._prompt_rate.tokens_per_s

    def prompt_share(self) -> float:
        """Return the share of the engine's time that running turns leave for prompts."""
        if self.prompts is None or not self.batch.turns:
            return 1.0
        return self.prompts.share(self.batch.seconds(1))

    def place_was_made(self) -> None:
        """Continue turns that waited for KV, because KV was released."""
        if self.idle and self.waiting and not self._between:
            self._begin()

    def seconds_until(self, horizon: float) -> tuple[float, float, float]:
        """Return the seconds until `horizon`: idle or stalled (same power), decoding, and prefilling."""
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
        """Plan the next phase: one iteration with prompts, or decoding until a turn ends."""
        now, batch = self._events.now, self.batch
        if self.on_changed is not None:
            self.on_changed(self.name)
        if self.idle:
            self.idle_s += now - self._began
        self._began = now
        self._iterations = 0
        if self._regrouping is not None:
            self._change(self._regrouping)
        for live in () if self._paused else self._back:
            batch.join(live)
            self._back = []
        if self._paused or self.pipeline is not None:
            self._chunks = []
            if self.pipeline is not None and not self._paused:
                self.pipeline.ready(self)
            return
        self._plan()
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

    def form(self) -> tuple[BatchWork, list[tuple[int, int]]]:
        """Return the decoding work of the next iteration, and its prompts as (new tokens, context)."""
        self._plan()
        return self.batch.work, [(tokens, live.context) for live, tokens in self._chunks]

    def _plan(self) -> None:
        self._make_place_for_one_token_each()
        self._chunks = self._next_chunks()

    def step(self, seconds: float) -> None:
        """Run the iteration that `form` returned, which takes `seconds` in the pipeline."""
        if self._chunks:
            adds, base = self.batch.prefill_seconds(self._chunks), self.batch.seconds(1)
            prompts = adds / (adds + base) if self.batch.turns else 1.0
            self.prefill_s += prompts * seconds
            self.decode_s += (1 - prompts) * seconds
        if self._chunks or self.batch.turns:
            self.idle_s += self._events.now - self._began
            self._began = self._events.now
            self._schedule(1, seconds)

    def _change(self, change: Regrouping) -> None:
        self._regrouping = None
        self.pipeline = change.pipeline
        self.kv.resize(change.kv_tokens)
        standing = self.batch.all()
        for live in standing:
            self.batch.leave(live)
        self._paused = True
        self._events.at(self._events.now + change.exchange_s, self._exchanged, standing)

    def _exchanged(self, standing: Any) -> None:
        self._back += standing
        self._paused = False
        self._soon()

    def _next_chunks(self) -> list[tuple[LiveConversation, int]]:
        """Return the prompt chunks of one iteration, in the order of `prompts`, or without it oldest first.

        Together they have as many tokens as the budget and the KV allow.
        """
        sharing, model, work = self.prompts, self.profile.latency, self.batch.work
        budget, decoding_s = self.profile.chunk_tokens - self.batch.turns, self.batch.seconds(1)
        if sharing is not None and self.waiting:
            budget = sharing.chunk(model, budget)
            self.waiting = deque(sorted(self.waiting, key=self._due))
        chunks: list[tuple[LiveConversation, int]] = []
        for live in tuple(self.waiting):
            if budget <= 0 or self.batch.turns + len(chunks) >= self.profile.max_turns:
                break
            if live not in self.waiting:
                continue  # a turn before it in this order preempted it
            if live.left and not self._hold_prompt_of(live, alone=not chunks):
                if sharing is None:
                    break
                continue  # a shorter prompt may hold its KV already
            tokens = min(live.todo, budget)
            if sharing is not None:
                if self.batch.turns:
                    tokens = sharing.tokens(model, work, decoding_s, live.context, tokens)
                if chunks and tokens < live.todo and self._due(live) > self._events.now:
                    break  # the prompts before it end now: only a part of an overdue prompt may delay that
                tokens = max(tokens, 1)
                work = work.plus(tokens, live.context)
            budget -= tokens
            chunks.append((live, tokens))
            if tokens < live.todo:
                break
        return chunks

    def _due(self, live: LiveConversation) -> float:
        assert self.prompts is not None
        return self.prompts.due(self.profile.latency, live.turn_at, live.todo, live.context)

    def _hold_prompt_of(self, live: LiveConversation, alone: bool) -> bool:
        """Take the KV that a prompt still needs; return False if there is too little KV."""
        missing = live.context + live.todo - live.held
        if missing <= 0:
            return True
        available = self.kv.free + self.kv.evictable - self.batch.turns
        if alone and (self.kv.pressure is not Pressure.PIN or not self.batch.turns):
            # A waiting turn takes KV from the turns that wait behind it. If KV is pinned, it does so only
            # when nothing runs, because then no turn would ever end.
            for behind in reversed(tuple(self.waiting)):
                if available >= missing or behind is live:
                    break
                if not behind.left:
                    continue  # a prefill leg, whose KV is held on its decoder
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
        # The last turn does not fit beside pinned KV, so that nothing could run: evict even pinned KV.
        kv.make_place(batch.turns, even_pinned=True)

    def _give_way(self, live: LiveConversation) -> None:
        """Take the KV of a waiting turn. With parking it is restored later, otherwise computed again."""
        if self.kv.pressure is not Pressure.PARK:
            self.kv.lose(live)
            self.recomputed += live.context
            live.todo += live.context
            live.context = 0
        elif live.held:
            self.kv.resident -= live.held
            live.held = 0
            self.waiting.remove(live)
            self.restoring.append(live)
            back = self.host.send(live.context * self.profile.kv_bytes_per_token, self._events.now)
            self._events.at(back, self._restored, live)

    def _restored(self, live: Any) -> None:
        self.restoring.remove(live)
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
            self._prompt_rate.observe(tokens, self._events.now - self._began)
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
        self._between = False
        self._begin()

    def _emit_first_token(self, live: LiveConversation) -> None:
        """Count the first output token, or hand over a prefill leg, when the prompt is complete."""
        if not live.left:
            self._on_prefilled(self, live)
            return
        if not live.first_token_at:  # a preempted turn has had its first token
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
