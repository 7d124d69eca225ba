"""Simulates a fleet with events, simulated engines, and the product's own placement classes."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from placement.engines import EngineInfo, EngineState, Role
from placement.prefetch_rules import PARK_AFTER_S
from placement.routing.bindings import Bindings
from placement.routing.placer import Placer
from placement.routing.placer_settings import FirstTurns, PlacerSettings
from placement.routing.receipts import Refusal, RefusalReason
from placement.scheduling.interface import DEFAULT_TARGETS
from placement.scheduling.prefill_curve import curve_of
from placement.scheduling.prompt_order import PromptSharing
from traces.format import TraceConversation
from traces.simulator.dropping import Dropping, DroppingSettings, largest_holding_tier
from traces.simulator.engine import EventQueue, OnLive, SimulatedEngine
from traces.simulator.kv import LiveConversation, Prefixes, Pressure, Where
from traces.simulator.metrics import Recorder, SimulationResult, SimulationTally, Totals, check
from traces.simulator.policies import SimulatedRouter, System, SystemSettings, TurnRoute
from traces.simulator.tiers import SimulatedFleet

COUNT_IDLE_S = 0.25
REPORT_EVERY_S = 1.0  # how often an engine reports that does not change


class SimulatedEngines:
    """Engines of a simulated fleet. They report before each decision of the placer.

    With elastic placing they report like real ones: every change, and once a second without one. With other
    policies they report only what changes the KV of conversations.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        settings: PlacerSettings,
        pressure: Pressure,
        idle_reported: bool,
        reserved_until_held: bool,
        events: EventQueue,
        on_prefilled: OnLive,
        on_finished: OnLive,
    ) -> None:
        self.engines: dict[str, SimulatedEngine] = {}
        self.infos: dict[str, EngineInfo] = {}
        self.prefillers: tuple[str, ...] = ()
        self.elastic = settings.first_turns is FirstTurns.ELASTIC
        curves = {}
        for tier in fleet.tiers:
            chunk, model = tier.profile.chunk_tokens, tier.profile.latency
            curves[tier.name] = curve_of(model, PromptSharing.chunk(model, chunk) if self.elastic else chunk)
        self.placer = Placer(settings, curves)
        # Engines to report, each with the conversations whose KV its report confirms.
        self._confirmed: dict[str, list[LiveConversation]] = {}
        self._reported_at: dict[str, float] = {}  # by engine, oldest first; empty without elastic placing
        self._seq = 0
        self._idle_reported = idle_reported
        self._reserved_until_held = reserved_until_held
        for tier in fleet.tiers:
            for number in range(tier.replicas):
                name = f"{tier.name}-{number}"
                self.engines[name] = SimulatedEngine(
                    name, tier.profile, events, pressure, on_prefilled, on_finished
                )
                if self.elastic:
                    self.engines[name].on_changed = self.changed
                    self._reported_at[name] = float("-inf")
                if tier.role is Role.PREFILL:
                    self.prefillers += (name,)
                kv_tokens = tier.profile.kv_tokens
                info = EngineInfo(name, tier.name, tier.role, 1, "", "", "", kv_tokens, 16, kv_tokens)
                self.infos[name] = info
                self.placer.engine_up(info)

    def changed(self, engine: str, confirmed: LiveConversation | None = None) -> None:
        visible = self._confirmed.setdefault(engine, [])
        if confirmed is not None:
            visible.append(confirmed)

    def report(self, now: float) -> None:
        """Report engines that changed since the last call, and those that reported more than a second ago."""
        for name, at in self._reported_at.items():
            if at > now - REPORT_EVERY_S:
                break
            self.changed(name)
        changed, self._confirmed = self._confirmed, {}
        for name, confirmed in changed.items():
            engine = self.engines[name]
            kv = engine.kv
            if self._reserved_until_held and (unseen := [live for live in confirmed if not live.held]):
                self._confirmed[name] = unseen
                confirmed = [live for live in confirmed if live.held]
            if self._reported_at.pop(name, None) is not None:
                self._reported_at[name] = now
            self._seq += 1
            state = EngineState(
                engine=name,
                epoch=1,
                seq=self._seq,
                live_tokens=kv.live,
                parked_tokens=kv.parked,
                offline_tokens=0,
                free_tokens=max(0, kv.free),
                running=engine.running,
                waiting=len(engine.waiting) + len(engine.restoring),
                confirmed=dict.fromkeys((live.key for live in confirmed), self._seq),
                idle_tokens=kv.idle if self._idle_reported else 0,
                waiting_prompt_tokens=engine.waiting_prompt_tokens(),
                waiting_kv_tokens=engine.waiting_kv_tokens(),
                prompt_tokens_per_s=engine.prompt_tokens_per_s(),
                prompt_share=engine.prompt_share(),
            )
            self.placer.observe(state, now)


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    system: SystemSettings = field(default_factory=SystemSettings)
    placer: PlacerSettings = field(default_factory=PlacerSettings)
    pressure: Pressure = Pressure.PARK
    park_after_s: float = PARK_AFTER_S  # with parking, idle KV goes to the host after this time
    linger_s: float = 0.0  # how long a conversation that no client ends holds its KV after its last turn
    prefillers_cache: bool = False  # prefillers keep prefixes of earlier turns, as vLLM does by default
    pull_blocks: bool = True  # an engine stands still while it pulls history, as in LMCache's load
    idle_reported: bool = True  # engines report evictable KV; if False, all KV counts as in use
    # Whether the KV of prompts that wait on an engine stays reserved until the engine holds it. The tables of
    # docs/measurements/simulation.md are without this.
    reserved_until_held: bool = False
    tbt_s: float = DEFAULT_TARGETS.tbt_s  # elastic: engines choose chunks so that running turns meet it
    dropping: DroppingSettings | None = None  # how parameters are dropped under overload; None: not at all
    seed: int = 0


class Simulation:
    """Plays conversations on a simulated fleet: they arrive, wait, are placed, prefilled and decoded.

    Between turns they are retained or parked, until they come back or end.
    """

    def __init__(self, fleet: SimulatedFleet, settings: SimulationSettings) -> None:
        self.settings = settings
        self._sticky = settings.system.system is System.STICKY
        self.events = EventQueue()
        self.recorder = Recorder()
        self.tally = SimulationTally()
        self.bindings = Bindings()
        # In order of binding: conversation, decoder, and prefiller of the first prompt (None: the decoder).
        self.bound: list[tuple[str, str, str | None]] = []
        self.fleet = SimulatedEngines(
            fleet,
            settings.system.placer_settings(settings.placer),
            # Sticky routing does not ask how full engines are, so with pinned KV they would fill up for good.
            Pressure.DROP if self._sticky and settings.pressure is Pressure.PIN else settings.pressure,
            settings.idle_reported,
            settings.reserved_until_held,
            self.events,
            self._prefilled,
            self._finished,
        )
        for engine in self.fleet.engines.values():
            engine.gaps = self.recorder.gaps
            if self.fleet.elastic:
                engine.prompts = PromptSharing(settings.tbt_s)
        self._turns_on = dict.fromkeys(self.fleet.engines, 0)
        self._largest = min(engine.kv.capacity for engine in self.fleet.engines.values())
        self._router = SimulatedRouter(
            settings.system, self.fleet.placer, self._turns_on, self.fleet.prefillers, settings.seed
        )
        self._prefixes = {
            name: Prefixes(engine.kv.capacity if settings.prefillers_cache else 0)
            for name, engine in self.fleet.engines.items()
        }
        self._gate: deque[LiveConversation] = deque()
        self._arrivals: Iterator[TraceConversation] = iter(())
        self._arrived = 0
        self._all_arrived = False
        self._served_at = 0.0  # end of the last turn; KV that lingers after it is not counted as work
        self.dropping: Dropping | None = None
        if settings.dropping is not None:
            tier = largest_holding_tier(fleet.tiers)
            engines = [self.fleet.engines[f"{tier.name}-{number}"] for number in range(tier.replicas)]
            self.dropping = Dropping(
                *(settings.dropping, tier, engines, self.fleet.placer, self.events),
                self._report_gate,
                self._place_was_made,
            )

    def run(self, conversations: Iterable[TraceConversation]) -> SimulationResult:
        """Play a trace, sorted by arrival, and return the results. Conversations are read as they arrive."""
        self._arrivals = iter(conversations)
        self._expect_next_arrival()
        self._count_idle(None)
        self.events.run()
        check(self.tally, self.fleet.engines.values(), self._served_at, waiting=len(self._gate))
        return SimulationResult(self.recorder, self._totals())

    def _expect_next_arrival(self) -> None:
        conversation = next(self._arrivals, None)
        self._all_arrived = conversation is None
        if conversation is not None:
            self.events.at(max(conversation.arrival_s, self.events.now), self._arrive, conversation)

    def _count_idle(self, _: Any) -> None:
        """Count idle engines and queued turns once a period, until the last conversation has arrived."""
        if self._all_arrived:
            return
        self.events.at(self.events.now + COUNT_IDLE_S, self._count_idle, None)
        engines, prefillers = self.fleet.engines, self.fleet.prefillers
        others = [engine for name, engine in engines.items() if name not in prefillers]
        self.tally.idle.sample(len(self._gate), [engines[name] for name in prefillers], others)

    def _arrive(self, conversation: Any) -> None:
        live = LiveConversation(conversation, self._arrived, self.events.now)
        self._arrived += 1
        self._expect_next_arrival()
        if self._gate or not self._place(live):
            self._gate.append(live)

    def _place(self, live: LiveConversation) -> bool:
        """Place a first turn; return False if it has to wait."""
        now = self.events.now
        self.fleet.report(now)
        parent = self.bindings.look_up(live.conversation.parent) if live.conversation.parent else None
        if self._sticky and live.turn.prompt_tokens + live.output_tokens > self._largest:
            self.tally.refused += 1
            return True
        answer = self._router.first(live, parent.engine if parent else None, now)
        if isinstance(answer, Refusal):
            if answer.reason is RefusalReason.TOO_LARGE:
                self.tally.refused += 1
                return True
            return False
        self.tally.gate_wait_s += now - live.arrived
        self.tally.first_turns += 1
        self.tally.first_turns_prefilled += answer.prefiller is not None
        self.tally.least_kv += answer.least_kv
        self.tally.last_resorts += self.fleet.elastic and answer.decoder in self.fleet.prefillers
        self.bindings.bind(live.key, answer.decoder, 1, now)
        self.bound.append((live.key, answer.decoder, answer.prefiller))
        self._start_turn(live, answer, cached=0, ready=now)
        self.fleet.changed(answer.decoder, confirmed=live)
        return True

    def _start_turn(self, live: LiveConversation, route: TurnRoute, cached: int, ready: float) -> None:
        """Start a turn. If a prefiller computes its prompt, the decoder holds KV for the prompt meanwhile."""
        prompt = live.turn.prompt_tokens
        decoder = self.fleet.engines[route.decoder]
        live.engine, live.where = route.decoder, Where.ACCELERATOR
        live.first_token_at = 0.0
        live.todo, live.context = prompt - cached, cached
        live.left = live.output_tokens
        self.tally.to_prefill += prompt - cached
        self.tally.to_decode += live.left
        self.tally.sent += prompt
        self.tally.needed_prefill += prompt - (live.turn.cached_tokens if live.turn_index else 0)
        self._turns_on[route.decoder] += 1
        if route.prefiller is None:
            self._at(ready, self._submit, (decoder, live))
            return
        decoder.kv.take(prompt - live.held)
        live.held = prompt
        live.left = 0  # the prefill leg decodes nothing
        live.lacking = prompt - cached
        self.tally.transfers += 1
        self._turns_on[route.prefiller] += 1
        prefiller = self.fleet.engines[route.prefiller]
        if not route.pull:
            still = self._still_on(route.prefiller, live)
            live.todo, live.context = prompt - still, still
            self.tally.to_prefill += cached - still  # the prefiller has only `still` of the cached tokens
        else:
            ready = self._pull(live, decoder, cached, ready)
        self._at(ready, self._submit, (prefiller, live))

    def _still_on(self, prefiller: str, live: LiveConversation) -> int:
        turn = live.turn
        return min(self._prefixes[prefiller].of(live.key), turn.cached_tokens, turn.prompt_tokens - 1)

    def _pull(self, live: LiveConversation, decoder: SimulatedEngine, cached: int, ready: float) -> float:
        size = cached * decoder.profile.kv_bytes_per_token
        arrives = decoder.network.send(size, ready)
        if not self.settings.pull_blocks:
            return arrives
        live.stall_s = arrives - ready
        return ready

    def _submit(self, argument: Any) -> None:
        engine, live = argument
        engine.submit(live)

    def _prefilled(self, prefiller: SimulatedEngine, live: LiveConversation) -> None:
        now = self.events.now
        self.fleet.placer.prefill_done(live.key, now)
        self._turns_on[prefiller.name] -= 1
        self._prefixes[prefiller.name].remember(live.key, live.context)
        arrives = prefiller.network.send(live.lacking * prefiller.profile.kv_bytes_per_token, now)
        self.fleet.placer.transferred(live.lacking, arrives - now)
        # The decoder computes the last prompt token itself, which gives it the first output token.
        live.todo, live.context, live.left = 1, live.context - 1, live.output_tokens
        self.tally.to_prefill += 1
        self._at(arrives, self._submit, (self.fleet.engines[live.engine], live))
        self._retry_gate()

    def _finished(self, engine: SimulatedEngine, live: LiveConversation) -> None:
        now = self.events.now
        self.recorder.turn_ended(live, now)
        self._served_at = now
        self._turns_on[engine.name] -= 1
        self.fleet.changed(engine.name)
        engine.kv.retain(live)
        settings, over = self.settings, live.is_last_turn
        live.turn_index += 1
        idle_s = settings.linger_s if over else live.turn.wait_s
        # The trace says how long the conversation stays idle, so parking is scheduled only if it will happen.
        if settings.pressure is Pressure.PARK and idle_s > settings.park_after_s:
            self.events.at(now + settings.park_after_s, self._park, (engine, live))
        self._at(now + idle_s, self._end if over else self._come_back, live)
        if engine.kv.idle:
            self._retry_gate()  # idle KV can be evicted

    def _park(self, argument: Any) -> None:
        engine, live = argument
        if live.where is Where.ACCELERATOR:  # it may have been parked earlier, when KV was short
            engine.kv.evict(live)
            self._place_was_made(engine)

    def _come_back(self, argument: Any) -> None:
        """Start the next turn of a bound conversation."""
        live: LiveConversation = argument
        now = live.turn_at = self.events.now
        binding = self.bindings.look_up(live.key)
        assert binding is not None and binding.engine == live.engine
        engine, turn = self.fleet.engines[live.engine], live.turn
        if turn.prompt_tokens + live.output_tokens > engine.profile.kv_tokens:
            self.tally.abandoned += 1
            self._end(live)
            return
        cached = min(turn.cached_tokens, live.held, turn.prompt_tokens - 1)
        if self.fleet.elastic:
            self.fleet.report(now)
        route = self._router.later(live, turn.prompt_tokens - cached, self._prefix, now)
        if route.decoder != live.engine:
            engine.kv.forget(live)
            self.bindings.bind(live.key, route.decoder, 1, now)
            self.fleet.changed(engine.name)
            engine, cached = self.fleet.engines[route.decoder], 0
        ready = now
        if live.where is Where.HOST:
            ready = engine.host.send(cached * engine.profile.kv_bytes_per_token, now)
        engine.kv.wake(live)
        engine.kv.trim(live, cached)
        self.tally.through_prefiller_again += route.prefiller is not None
        self._start_turn(live, route, cached, ready)
        self.fleet.changed(live.engine, confirmed=live)

    def _prefix(self, live: LiveConversation) -> tuple[str, int]:
        """Return the prefiller that still has most of a turn's prompt, and how much of it."""
        name = max(self.fleet.prefillers, key=lambda name: self._still_on(name, live), default="")
        return name, self._still_on(name, live) if name else 0

    def _end(self, argument: Any) -> None:
        live: LiveConversation = argument
        engine = self.fleet.engines[live.engine]
        engine.kv.forget(live)
        self.bindings.end(live.key)
        self.fleet.placer.release(live.key, self.events.now)
        self._place_was_made(engine)

    def _place_was_made(self, engine: SimulatedEngine) -> None:
        self.fleet.changed(engine.name)
        engine.place_was_made()
        self._retry_gate()

    def _report_gate(self) -> list[int]:
        self.fleet.report(self.events.now)
        return [live.turn.prompt_tokens for live in self._gate]

    def _retry_gate(self) -> None:
        while self._gate and self._place(self._gate[0]):
            self._gate.popleft()

    def _at(self, time: float, action: Any, argument: Any) -> None:
        if time <= self.events.now:
            action(argument)
        else:
            self.events.at(time, action, argument)

    def _totals(self) -> Totals:
        tally, horizon = self.tally, self._served_at
        engines = self.fleet.engines.values()
        prefilled = sum(engine.prefilled for engine in engines)
        decoded = sum(engine.decoded for engine in engines)
        joules = sum(engine.joules(horizon) for engine in engines)
        return Totals(
            conversations=self._arrived,
            refused=tally.refused,
            abandoned=tally.abandoned,
            horizon_s=horizon,
            prefilled_tokens=prefilled,
            decoded_tokens=decoded,
            recomputed_tokens=prefilled + decoded - tally.needed_prefill - tally.to_decode,
            transfers=tally.transfers,
            parked_tokens=sum(engine.kv.parked_in_all for engine in engines),
            preemptions=sum(engine.preempted for engine in engines),
            through_prefiller_again=tally.through_prefiller_again,
            last_resorts=tally.last_resorts,
            idle_while_waiting=tally.idle.of_the_least_busy_role,
            prefiller_share=tally.first_turns_prefilled / max(1, tally.first_turns),
            least_kv_share=tally.least_kv / max(1, tally.first_turns),
            gate_wait_s=tally.gate_wait_s,
            joules=joules,
            tokens_per_joule=(tally.sent + tally.to_decode) / joules if joules else 0.0,
            events=self.events.handled,
            drops=self.dropping.tally.drops if self.dropping else 0,
            split_s=self.dropping.tally.split_s if self.dropping else 0.0,
        )
