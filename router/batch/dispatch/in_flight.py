"""Tracks offline requests at the engines, judges how attempts ended, and pauses engines after errors."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from placement.engines import EngineInfo, EngineState
from router.batch.config import DispatchSettings
from router.batch.dispatch.policy import SUSPECT_AFTER, EngineSlots
from router.batch.metrics import IN_FLIGHT
from router.batch.store.records import group_of
from router.errors import EngineBusy, EngineLost, EngineSilent, EngineUnreachable, UpstreamError

Engines = Sequence[tuple[EngineInfo, EngineState | None]]  # engines that can serve; None: no report yet

_WARM_GROUPS = 4096
_BUSY = (429, 503)
_RETRIED = (408, 425, 500, 502, 504)


@dataclass(frozen=True, slots=True)
class SentRequest:
    engine: str
    est_tokens: int
    suspect: bool
    sent_after: int  # the engine's last report when it was sent: later reports include it


class InFlight:
    def __init__(self, settings: DispatchSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._sent: dict[object, SentRequest] = {}
        self._failures: Counter[str] = Counter()
        self._rest_until: dict[str, float] = {}
        self._epochs: dict[str, int] = {}
        self._seen: dict[str, float] = {}  # when the fleet view last had the engine
        self._fed: dict[str, float] = {}  # when an engine last had offline work, or was new
        self.warm: OrderedDict[str, str] = OrderedDict()  # prefix group -> engine that last got it

    def add(
        self, key: object, engine: EngineInfo, state: EngineState | None, prefix: str, tokens: int, tries: int
    ) -> None:
        seq = state.seq if state is not None else -1
        self._sent[key] = SentRequest(engine.engine, tokens, tries >= SUSPECT_AFTER, seq)
        IN_FLIGHT.labels(engine.engine).inc()
        group = group_of(prefix)
        self.warm[group] = engine.engine
        self.warm.move_to_end(group)
        if len(self.warm) > _WARM_GROUPS:
            self.warm.popitem(last=False)

    def remove(self, key: object) -> None:
        IN_FLIGHT.labels(self._sent.pop(key).engine).dec()

    def engine_failed(self, engine: str) -> None:
        """Pause an engine, longer after each failure in a row. Failures during a pause do not count."""
        now = self._clock()
        if self._rest_until.get(engine, 0.0) <= now:
            self._failures[engine] += 1
            self._rest_until[engine] = now + back_off(self._failures[engine], self._settings)

    def engine_answered(self, engine: str) -> None:
        self._failures.pop(engine, None)

    def lost(self, engine: EngineInfo) -> bool:
        """Return whether an engine's epoch is over, or the engine has been missing for `lost_after_s`."""
        if self._epochs.get(engine.engine, engine.epoch) != engine.epoch:
            return True
        now = self._clock()
        return now - self._seen.get(engine.engine, now) > self._settings.lost_after_s

    def slots(self, engines: Engines) -> list[EngineSlots]:
        now = self._clock()
        count: Counter[str] = Counter()
        suspects: Counter[str] = Counter()
        unseen: Counter[str] = Counter()
        last_seq = {info.engine: state.seq for info, state in engines if state is not None}
        for sent in self._sent.values():
            count[sent.engine] += 1
            suspects[sent.engine] += sent.suspect
            if sent.sent_after >= last_seq.get(sent.engine, -1):
                unseen[sent.engine] += sent.est_tokens
        for info, _ in engines:
            self._epochs[info.engine], self._seen[info.engine] = info.epoch, now
            if count[info.engine] or info.engine not in self._fed:
                self._fed[info.engine] = now
        ageing_s = self._settings.ageing_s
        return [
            EngineSlots(
                engine=info.engine,
                role=info.role,
                kv_tokens=info.kv_tokens,
                state=state,
                in_flight=count[info.engine],
                unseen_tokens=unseen[info.engine],
                suspects=suspects[info.engine],
                resting=self._rest_until.get(info.engine, 0.0) > now,
                starved=ageing_s is not None and now - self._fed[info.engine] > ageing_s,
            )
            for info, state in engines
        ]


class Ending(StrEnum):
    """Reason why an attempt ended."""

    ANSWERED = "answered"
    BUSY = "busy"
    ERROR = "error"
    UNREACHABLE = "unreachable"
    ENGINE_LOST = "engine_lost"
    TIMEOUT = "timeout"
    SHARES_LAYERS = "shares_layers"  # an engine that shares its layers runs nothing offline
    FAULT = "fault"  # an error in this process

    @property
    def counts(self) -> bool:
        """Return whether the attempt counts against the request's limit of attempts."""
        return self not in (Ending.BUSY, Ending.UNREACHABLE, Ending.SHARES_LAYERS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequences of an attempt's end for the request and for its engine."""

    ending: Ending
    engine_rests: bool  # the engine is paused

    def final(self, tries: int, max_tries: int) -> bool:
        """Return whether this attempt was the last, after `tries` earlier attempts that counted."""
        last = self.ending.counts and tries + 1 >= max_tries
        return last or self.ending is Ending.ANSWERED


def judge_status(status: int) -> Verdict:
    if status in _BUSY:
        return Verdict(Ending.BUSY, engine_rests=True)
    if status in _RETRIED:
        return Verdict(Ending.ERROR, engine_rests=status != 408)
    return Verdict(Ending.ANSWERED, engine_rests=False)


def judge_error(error: UpstreamError) -> Verdict:
    match error:
        case EngineUnreachable():
            return Verdict(Ending.UNREACHABLE, engine_rests=True)
        case EngineBusy():
            return Verdict(Ending.BUSY, engine_rests=True)
        case EngineLost():
            return Verdict(Ending.ENGINE_LOST, engine_rests=True)
        case EngineSilent():
            return Verdict(Ending.TIMEOUT, engine_rests=False)
    return Verdict(Ending.ERROR, engine_rests=True)


def back_off(failures: int, settings: DispatchSettings) -> float:
    """Return the seconds to wait after this many failures in a row."""
    return float(min(settings.backoff_max_s, settings.backoff_first_s * 2.0 ** min(failures - 1, 20)))
