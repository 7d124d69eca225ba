"""The simulated engines, and what they tell the placer."""

from placement.engines import EngineInfo, EngineState, Role
from placement.placer import Placer, PlacerSettings
from traces.simulator.curve import prefill_curve
from traces.simulator.entities.engine import Engine, OnLive
from traces.simulator.entities.kv import Pressure
from traces.simulator.events import EventQueue
from traces.simulator.profile import Fleet


class SimulatedFleet:
    """Engines report on change, as real ones do; a report is only made when the placer is about to look."""

    def __init__(
        self,
        fleet: Fleet,
        settings: PlacerSettings,
        pressure: Pressure,
        idle_reported: bool,
        events: EventQueue,
        on_prefilled: OnLive,
        on_finished: OnLive,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self.infos: dict[str, EngineInfo] = {}
        self.tier_of: dict[str, str] = {}
        self.roles: dict[str, Role] = {}
        self.placer = Placer(settings, {tier.name: prefill_curve(tier.profile) for tier in fleet.tiers})
        self._confirmed: dict[str, list[str]] = {}  # changed engines, with what became visible on them
        self._seq = 0
        self._idle_reported = idle_reported
        for tier in fleet.tiers:
            for number in range(tier.replicas):
                name = f"{tier.name}-{number}"
                self.engines[name] = Engine(name, tier.profile, events, pressure, on_prefilled, on_finished)
                self.tier_of[name], self.roles[name] = tier.name, tier.role
                kv_tokens = tier.profile.kv_tokens
                info = EngineInfo(name, tier.name, tier.role, 1, "", "", "", kv_tokens, 16, kv_tokens)
                self.infos[name] = info
                self.placer.engine_up(info)

    @property
    def prefillers(self) -> tuple[str, ...]:
        return tuple(name for name, role in self.roles.items() if role is Role.PREFILL)

    def changed(self, engine: str, confirmed: str | None = None) -> None:
        visible = self._confirmed.setdefault(engine, [])
        if confirmed is not None:
            visible.append(confirmed)

    def report(self, now: float) -> None:
        """What changed since the last look."""
        for name, confirmed in self._confirmed.items():
            engine = self.engines[name]
            kv = engine.kv
            self._seq += 1
            state = EngineState(
                engine=name,
                epoch=1,
                seq=self._seq,
                live_tokens=kv.live,
                parked_tokens=kv.parked,
                offline_tokens=0,
                free_tokens=max(0, kv.room),
                running=engine.running,
                waiting=len(engine.waiting) + engine.restoring,
                confirmed=tuple(confirmed),
                idle_tokens=kv.idle if self._idle_reported else 0,
            )
            self.placer.observe(state, now)
        self._confirmed.clear()
