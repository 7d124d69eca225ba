"""What this dispatcher has at the engines now, and which engines rest after errors."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from placement.engines import EngineInfo, EngineState
from router.batch.config import DispatchSettings
from router.batch.metrics import IN_FLIGHT
from router.batch.policy import EngineView
from router.batch.prefix import group_of
from router.batch.retry import back_off

_WARM_GROUPS = 4096


@dataclass(frozen=True, slots=True)
class Flight:
    engine: str
    epoch: int
    est_tokens: int
    suspect: bool
    sent_after: int  # the engine's last report when it left: later reports include it


class Flights:
    def __init__(self, settings: DispatchSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._flights: dict[object, Flight] = {}
        self._failures: Counter[str] = Counter()
        self._rest_until: dict[str, float] = {}
        self.warm: OrderedDict[str, str] = OrderedDict()  # prefix group -> the engine it last went to

    def __len__(self) -> int:
        return len(self._flights)

    def depart(
        self, key: object, engine: EngineInfo, state: EngineState | None, prefix: str, tokens: int, tries: int
    ) -> None:
        suspect = tries >= self._settings.suspect_after
        seq = state.seq if state is not None else -1
        self._flights[key] = Flight(engine.engine, engine.epoch, tokens, suspect, seq)
        IN_FLIGHT.labels(engine.engine).inc()
        group = group_of(prefix)
        self.warm[group] = engine.engine
        self.warm.move_to_end(group)
        if len(self.warm) > _WARM_GROUPS:
            self.warm.popitem(last=False)

    def land(self, key: object) -> None:
        flight = self._flights.pop(key)
        IN_FLIGHT.labels(flight.engine).dec()

    def engine_failed(self, engine: str) -> None:
        """Failures of requests that were there together count as one: it already rests then."""
        now = self._clock()
        if self._rest_until.get(engine, 0.0) <= now:
            self._failures[engine] += 1
            self._rest_until[engine] = now + back_off(self._failures[engine], self._settings)

    def engine_answered(self, engine: str) -> None:
        self._failures.pop(engine, None)

    def views(self, engines: Iterable[tuple[EngineInfo, EngineState | None]]) -> list[EngineView]:
        now = self._clock()
        count: Counter[str] = Counter()
        suspects: Counter[str] = Counter()
        unseen: Counter[str] = Counter()
        last_seq = {info.engine: state.seq for info, state in engines if state is not None}
        for flight in self._flights.values():
            count[flight.engine] += 1
            suspects[flight.engine] += flight.suspect
            if flight.sent_after >= last_seq.get(flight.engine, -1):
                unseen[flight.engine] += flight.est_tokens
        return [
            EngineView(
                engine=info.engine,
                role=info.role,
                kv_tokens=info.kv_tokens,
                state=state,
                in_flight=count[info.engine],
                unseen_tokens=unseen[info.engine],
                suspects=suspects[info.engine],
                resting=self._rest_until.get(info.engine, 0.0) > now,
            )
            for info, state in engines
        ]
