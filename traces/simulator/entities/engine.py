"""An engine: a batch that decodes, prompts in chunks beside it, first come first served, and its KV."""

from collections import deque
from collections.abc import Callable
from typing import Any

from traces.simulator.entities.batch import Batch
from traces.simulator.entities.gaps import Gaps
from traces.simulator.entities.kv import KvStore, Pressure
from traces.simulator.entities.link import Link
from traces.simulator.entities.live import Live
from traces.simulator.events import EventQueue
from traces.simulator.profile import EngineProfile

MAX_ROWS = 256  # vLLM's max_num_seqs
OnLive = Callable[["Engine", Live], None]


class Engine:
    """Calls `on_finished` when a turn has decoded its last token.

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
        self.waiting: deque[Live] = deque()
        self.batch = Batch(profile.latency)
        self.prefilled = self.decoded = self.recomputed = 0  # tokens
        self.preempted = 0  # times
        self.restored = 0  # tokens that gave way and came back from the host
        self.restoring = 0  # turns on their way back
        self.idle_s = self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.gaps: Gaps | None = None  # where they are to be recorded
        self._events = events
        self._on_prefilled = on_prefilled
        self._on_finished = on_finished
        self._began = 0.0
        self._iterations = 0  # of the phase under way; 0 when idle
        self._chunks: list[tuple[Live, int]] = []
        self._phase = 0  # an event of an earlier phase is void
        self._between = False

    @property
    def running(self) -> int:
        return self.batch.rows

    @property
    def idle(self) -> bool:
        return self._iterations == 0

    def submit(self, live: Live) -> None:
        """A turn to compute (`todo` tokens behind `context`) and then to decode (`left` tokens)."""
        self.waiting.append(live)
        if self._between:
            return
        if self.idle:
            self._begin()
        elif not self._chunks:
            self._join_at_next_boundary()

    def room_was_made(self) -> None:
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
            self.prefill_s += adds if batch.rows else adds + base
            self.decode_s += base if batch.rows else 0.0
            self.stalled_s += stall
            self._schedule(1, base + adds + stall)
        elif batch.rows:
            fits = max(1, self.kv.room // batch.rows)
            iterations = min(batch.until_an_end(), fits)
            self._schedule(iterations, batch.seconds(iterations))
        else:
            self._iterations = 0

    def _next_chunks(self) -> list[tuple[Live, int]]:
        """Prompts for one iteration, oldest first, as many tokens as the budget and the KV allow."""
        budget = self.profile.chunk_tokens - self.batch.rows
        chunks: list[tuple[Live, int]] = []
        waiting = self.waiting
        while len(chunks) < len(waiting):  # those behind may leave while one is given room
            live = waiting[len(chunks)]
            if budget <= 0 or self.batch.rows + len(chunks) >= MAX_ROWS:
                break
            if live.left and not self._hold_prompt_of(live, alone=not chunks):
                break
            tokens = min(live.todo, budget)
            budget -= tokens
            chunks.append((live, tokens))
        return chunks

    def _hold_prompt_of(self, live: Live, alone: bool) -> bool:
        """Take the KV a prompt lacks. A prefill leg holds nothing here: its KV is the decoder's."""
        missing = live.context + live.todo - live.held
        if missing <= 0:
            return True
        available = self.kv.room + self.kv.yielding - self.batch.rows
        if alone and (self.kv.pressure is not Pressure.PIN or not self.batch.rows):
            # A turn that only waits has no claim on KV: those behind the first give way to it. What is
            # pinned does so only when nothing runs, for then nothing would end.
            for behind in reversed(tuple(self.waiting)):
                if available >= missing or behind is live:
                    break
                available += behind.held
                self._give_way(behind)
        if missing > available:
            return False
        self.kv.take(missing)
        live.held += missing
        return True

    def _make_place_for_one_token_each(self) -> None:
        batch, kv = self.batch, self.kv
        if kv.room >= batch.rows:
            return
        kv.make_room(batch.rows)
        while kv.room < batch.rows and batch.rows > 1:
            youngest = batch.youngest()
            batch.leave(youngest)
            youngest.held = youngest.context
            youngest.todo, youngest.context = 1, youngest.context - 1  # a resumed turn computes a token
            self.recomputed += 1
            self.waiting.appendleft(youngest)
            self._give_way(youngest)
            self.preempted += 1
        # The last row alone does not fit beside what is pinned, and a pin that stops everything helps nobody.
        kv.make_room(batch.rows, even_pinned=True)

    def _give_way(self, live: Live) -> None:
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
            self.restored += live.context
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
        if self.gaps is not None and batch.rows:
            seconds = (self._events.now - self._began) / self._iterations
            self.gaps.add(seconds, batch.rows * self._iterations)
        self._between = True
        grown = batch.rows * self._iterations
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
                self.waiting.popleft()
                self._emit_first_token(live)
        self._between = False
        self._begin()

    def _emit_first_token(self, live: Live) -> None:
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

    def _finish(self, live: Live) -> None:
        live.held = live.context
        self._on_finished(self, live)
