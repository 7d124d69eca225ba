"""What went wrong, as a client sees it: the directory's refusals, engines that did not answer."""

from placement.admission import Refusal, RefusalReason
from router.errors import (
    ApiError,
    ContextTooLong,
    EngineLost,
    EngineUnreachable,
    TooManyRequests,
    Unavailable,
)
from router.http import RelayEnd, RelayOutcome, Responder

_DIRECTORY_RETRY_S = 2.0
_DEAD_ENGINE = (b"EngineCore", b"EngineDead")  # in vLLM's own words


def refused(refusal: Refusal) -> ApiError:
    retry = refusal.retry_after_s or None
    if refusal.reason is RefusalReason.TOO_LARGE:
        return ContextTooLong(refusal.message)
    if refusal.reason in (RefusalReason.NO_ROOM, RefusalReason.SATURATED):
        return TooManyRequests(refusal.message, code=refusal.reason, retry_after_s=retry)
    return Unavailable(refusal.message, code=refusal.reason, retry_after_s=retry)


def unreachable(wrong: Exception) -> ApiError:
    return Unavailable(
        f"new conversations cannot be placed now: {wrong}; those that run go on, try again",
        code="no_directory",
        retry_after_s=_DIRECTORY_RETRY_S,
    )


def decoder_lost(outcome: RelayOutcome) -> bool:
    """Nothing of an answer was seen, and none will come from there."""
    if outcome.end is RelayEnd.NOT_STARTED:
        return isinstance(outcome.error, EngineLost | EngineUnreachable)
    held = outcome.response if outcome.end is RelayEnd.HELD else None
    return held is not None and (held.status == 503 or any(mark in held.body for mark in _DEAD_ENGINE))


def answer_what_is_left(outcome: RelayOutcome, responder: Responder) -> None:
    """An answer that was held back goes to the client after all; one that never came is an error."""
    if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
        raise outcome.error
    if outcome.end is RelayEnd.HELD and outcome.response is not None:
        kind = outcome.response.headers.get(b"content-type") or b"application/json"
        responder.respond(outcome.response.status, outcome.response.body, [(b"content-type", kind)])
