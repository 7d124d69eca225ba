"""The life of conversations on a simulated fleet, in the order in which it happens.

Arrive, be placed (or wait at the gate), be prefilled, be transferred, decode; between turns be kept or
parked; come back; end.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from placement.bindings import Bindings
from placement.placer import PlacerSettings, Refusal, RefusalReason
from traces.format import Conversation
from traces.simulator.conservation import Books, check
from traces.simulator.entities.engine import Engine
from traces.simulator.entities.gaps import Gaps
from traces.simulator.entities.kv import Pressure
from traces.simulator.entities.live import Live, Where
from traces.simulator.entities.prefixes import Prefixes
from traces.simulator.events import EventQueue
from traces.simulator.fleet import SimulatedFleet
from traces.simulator.metrics import Recorder, Result, Totals
from traces.simulator.policies import Loads, Route, Router, SystemSettings
from traces.simulator.profile import Fleet


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    system: SystemSettings = field(default_factory=SystemSettings)
    placer: PlacerSettings = field(default_factory=PlacerSettings)
    pressure: Pressure = Pressure.PARK
    park_after_s: float = 30.0  # idle KV goes to the host after this long, where there is parking
    linger_s: float = 0.0  # a conversation nobody ends holds its KV this long after its last turn
    prefillers_cache: bool = False  # prefillers keep prefixes of earlier turns, as vLLM does by default
    pull_blocks: bool = True  # an engine waits for history it pulls, as LMCache's load does
    idle_reported: bool = True  # engines say which of their KV gives way; else all of it counts against room
    token_gaps: bool = False  # record the time before each token
    seed: int = 0


class Simulation:
    def __init__(self, fleet: Fleet, settings: SimulationSettings) -> None:
        self.settings = settings
        self.events = EventQueue()
        self.recorder = Recorder()
        self.books = Books()
        self.gaps = Gaps() if settings.token_gaps else None
        self.bindings = Bindings()
        self.bound: list[tuple[str, str]] = []  # conversation and decoder, in the order of binding
        self.fleet = SimulatedFleet(
            fleet,
            settings.system.placer_settings(settings.placer),
            settings.pressure,
            settings.idle_reported,
            self.events,
            self._prefilled,
            self._finished,
        )
        for engine in self.fleet.engines.values():
            engine.gaps = self.gaps
        self._turns_on = dict.fromkeys(self.fleet.engines, 0)
        self._router = Router(
            settings.system, self.fleet.placer, Loads(self._turns_on, self.fleet.prefillers), settings.seed
        )
        self._prefixes = {
            name: Prefixes(engine.kv.capacity if settings.prefillers_cache else 0)
            for name, engine in self.fleet.engines.items()
        }
        self._gate: deque[Live] = deque()
        self._arrivals: Iterator[Conversation] = iter(())
        self._arrived = 0
        self._served_at = 0.0  # the last turn's end: what lingers after it is nobody's work

    def run(self, conversations: Iterable[Conversation]) -> Result:
        """Play a whole trace, in order of arrival; conversations are read as their time comes."""
        self._arrivals = iter(conversations)
        self._expect_next_arrival()
        self.events.run()
        check(self.books, self.fleet.engines.values(), self._served_at, waiting=len(self._gate))
        return Result(self.recorder, self._totals(), self.gaps)

    def _expect_next_arrival(self) -> None:
        conversation = next(self._arrivals, None)
        if conversation is not None:
            self.events.at(max(conversation.arrival_s, self.events.now), self._arrive, conversation)

    def _arrive(self, conversation: Any) -> None:
        live = Live(conversation, self._arrived, self.events.now)
        self._arrived += 1
        self._expect_next_arrival()
        if self._gate or not self._place(live):
            self._gate.append(live)

    def _place(self, live: Live) -> bool:
        """Place a first turn; False when it has to wait."""
        now = self.events.now
        self.fleet.report(now)
        parent = self.bindings.look_up(live.conversation.parent) if live.conversation.parent else None
        answer = self._router.first(live, parent.engine if parent else None, now)
        if isinstance(answer, Refusal):
            if answer.reason is RefusalReason.TOO_LARGE:
                self.books.refused += 1
                return True
            return False
        self.books.gate_wait_s += now - live.arrived
        self.bindings.bind(live.key, answer.decoder, 1, now)
        self.bound.append((live.key, answer.decoder))
        self._start_turn(live, answer, cached=0, ready=now)
        self.fleet.changed(answer.decoder, confirmed=live.key)
        return True

    def _start_turn(self, live: Live, route: Route, cached: int, ready: float) -> None:
        """Hold the prompt's KV on the decoder; compute it there, or on a prefiller first."""
        prompt = live.turn.prompt_tokens
        decoder = self.fleet.engines[route.decoder]
        live.engine, live.where = route.decoder, Where.ACCELERATOR
        live.first_token_at = 0.0
        live.todo, live.context = prompt - cached, cached
        live.left = live.output_tokens
        self.books.to_prefill += prompt - cached
        self.books.to_decode += live.left
        self.books.sent += prompt
        self.books.needed_prefill += prompt - (live.turn.cached_tokens if live.turn_index else 0)
        self._turns_on[route.decoder] += 1
        if route.prefiller is None:
            self._at(ready, self._submit, (decoder, live))
            return
        decoder.kv.take(prompt - live.held)
        live.held = prompt
        live.left = 0  # the prefill leg decodes nothing
        live.lacking = prompt - cached
        self.books.transfers += 1
        self._turns_on[route.prefiller] += 1
        prefiller = self.fleet.engines[route.prefiller]
        if not route.pull:
            still = min(self._prefixes[route.prefiller].of(live.key), live.turn.cached_tokens, prompt - 1)
            live.todo, live.context = prompt - still, still
            self.books.to_prefill += cached - still  # of what the decoder has, the prefiller has only this
        else:
            ready = self._pull(live, decoder, cached, ready)
        self._at(ready, self._submit, (prefiller, live))

    def _pull(self, live: Live, decoder: Engine, cached: int, ready: float) -> float:
        size = cached * decoder.profile.kv_bytes_per_token
        arrives = decoder.network.send(size, ready)
        self.books.transferred += cached
        if not self.settings.pull_blocks:
            return arrives
        live.stall_s = arrives - ready
        return ready

    def _submit(self, argument: Any) -> None:
        engine, live = argument
        engine.submit(live)

    def _prefilled(self, prefiller: Engine, live: Live) -> None:
        now = self.events.now
        self.fleet.placer.prefill_done(live.key, now)
        self._turns_on[prefiller.name] -= 1
        self._prefixes[prefiller.name].remember(live.key, live.context)
        self.books.transferred += live.lacking
        arrives = prefiller.network.send(live.lacking * prefiller.profile.kv_bytes_per_token, now)
        # The decoder computes the last prompt token itself, which gives it the first output token.
        live.todo, live.context, live.left = 1, live.context - 1, live.output_tokens
        self.books.to_prefill += 1
        self._at(arrives, self._submit, (self.fleet.engines[live.engine], live))
        self._retry_gate()

    def _finished(self, engine: Engine, live: Live) -> None:
        now = self.events.now
        self.recorder.turn_ended(live, now)
        self._served_at = now
        self._turns_on[engine.name] -= 1
        self.bindings.touch(live.key, now)
        self.fleet.changed(engine.name)
        engine.kv.keep(live)
        settings, over = self.settings, live.is_last_turn
        live.turn_index += 1
        idle_s = settings.linger_s if over else live.turn.wait_s
        # The trace knows how long this one stays idle; an event that would find it gone is left out.
        if settings.pressure is Pressure.PARK and idle_s > settings.park_after_s:
            self.events.at(now + settings.park_after_s, self._park, (engine, live))
        self._at(now + idle_s, self._end if over else self._come_back, live)
        if engine.kv.idle:
            self._retry_gate()  # what is idle gives way

    def _park(self, argument: Any) -> None:
        engine, live = argument
        if live.where is Where.ACCELERATOR:  # pressure may have been earlier
            engine.kv.evict(live)
            self._room_was_made(engine)

    def _come_back(self, argument: Any) -> None:
        """The next turn of a bound conversation."""
        live: Live = argument
        now = live.turn_at = self.events.now
        binding = self.bindings.look_up(live.key)
        assert binding is not None and binding.engine == live.engine
        engine, turn = self.fleet.engines[live.engine], live.turn
        if turn.prompt_tokens + live.output_tokens > engine.kv.capacity:
            self.books.abandoned += 1
            self._end(live)
            return
        cached = min(turn.cached_tokens, live.held, turn.prompt_tokens - 1)
        route = self._router.later(live, turn.prompt_tokens - cached, now)
        if route.decoder != live.engine:
            engine.kv.forget(live)
            self.bindings.bind(live.key, route.decoder, 1, now)
            self.fleet.changed(engine.name)
            engine, cached = self.fleet.engines[route.decoder], 0
        ready = now
        if live.where is Where.HOST:
            self.books.restored += cached
            ready = engine.host.send(cached * engine.profile.kv_bytes_per_token, now)
        engine.kv.wake(live)
        engine.kv.trim(live, cached)
        self.books.through_prefiller_again += route.prefiller is not None
        self._start_turn(live, route, cached, ready)
        self.fleet.changed(live.engine, confirmed=live.key)

    def _end(self, argument: Any) -> None:
        live: Live = argument
        engine = self.fleet.engines[live.engine]
        engine.kv.forget(live)
        self.bindings.end(live.key)
        self.fleet.placer.release(live.key, self.events.now)
        self._room_was_made(engine)

    def _room_was_made(self, engine: Engine) -> None:
        self.fleet.changed(engine.name)
        engine.room_was_made()
        self._retry_gate()

    def _retry_gate(self) -> None:
        while self._gate and self._place(self._gate[0]):
            self._gate.popleft()

    def _at(self, time: float, action: Any, argument: Any) -> None:
        if time <= self.events.now:
            action(argument)
        else:
            self.events.at(time, action, argument)

    def _totals(self) -> Totals:
        books, horizon = self.books, self._served_at
        by_tier: dict[str, float] = {}
        engines = self.fleet.engines.values()
        for engine in engines:
            tier = self.fleet.tier_of[engine.name]
            by_tier[tier] = by_tier.get(tier, 0.0) + engine.joules(horizon)
        return Totals(
            conversations=self._arrived,
            refused=books.refused,
            abandoned=books.abandoned,
            horizon_s=horizon,
            prefilled_tokens=sum(engine.prefilled for engine in engines),
            decoded_tokens=sum(engine.decoded for engine in engines),
            served_tokens=books.sent + books.to_decode,
            needed_tokens=books.needed_prefill + books.to_decode,
            transfers=books.transfers,
            transferred_tokens=books.transferred,
            parked_tokens=sum(engine.kv.parked_in_all for engine in engines),
            restored_tokens=books.restored + sum(engine.restored for engine in engines),
            dropped_tokens=sum(engine.kv.dropped for engine in engines),
            preemptions=sum(engine.preempted for engine in engines),
            through_prefiller_again=books.through_prefiller_again,
            gate_wait_s=books.gate_wait_s,
            joules=sum(by_tier.values()),
            joules_by_tier=by_tier,
            events=self.events.handled,
        )
