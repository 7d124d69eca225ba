"""What a try's end means for the request and for the engine it was at. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from router.batch.config import DispatchSettings
from router.errors import EngineBusy, EngineLost, EngineSilent, EngineUnreachable, UpstreamError

_BUSY = (429, 503)
_RETRIED = (408, 425, 500, 502, 504)


class Ending(StrEnum):
    ANSWERED = "answered"
    BUSY = "busy"
    ERROR = "error"
    UNREACHABLE = "unreachable"
    ENGINE_LOST = "engine_lost"
    TIMEOUT = "timeout"
    FAULT = "fault"  # of ours


@dataclass(frozen=True, slots=True)
class Verdict:
    ending: Ending
    final: bool  # this is the request's result
    counts: bool  # as one of its tries
    engine_rests: bool


def judge_status(status: int, tries: int, settings: DispatchSettings) -> Verdict:
    if status in _BUSY:
        return Verdict(Ending.BUSY, final=False, counts=False, engine_rests=True)
    if status in _RETRIED:
        return _failed(Ending.ERROR, tries, settings, engine_rests=status != 408)
    return Verdict(Ending.ANSWERED, final=True, counts=True, engine_rests=False)


def judge_error(error: UpstreamError, tries: int, settings: DispatchSettings) -> Verdict:
    match error:
        case EngineUnreachable():
            return Verdict(Ending.UNREACHABLE, final=False, counts=False, engine_rests=True)
        case EngineBusy():
            return Verdict(Ending.BUSY, final=False, counts=False, engine_rests=True)
        case EngineLost():
            return _failed(Ending.ENGINE_LOST, tries, settings, engine_rests=True)
        case EngineSilent():
            return _failed(Ending.TIMEOUT, tries, settings, engine_rests=False)
    return _failed(Ending.ERROR, tries, settings, engine_rests=True)


def judge_fault(tries: int, settings: DispatchSettings) -> Verdict:
    return _failed(Ending.FAULT, tries, settings, engine_rests=False)


def back_off(failures: int, settings: DispatchSettings) -> float:
    """Seconds to wait after so many failures in a row."""
    return float(min(settings.backoff_max_s, settings.backoff_first_s * 2.0 ** min(failures - 1, 20)))


def _failed(ending: Ending, tries: int, settings: DispatchSettings, engine_rests: bool) -> Verdict:
    return Verdict(ending, final=tries + 1 >= settings.max_tries, counts=True, engine_rests=engine_rests)
