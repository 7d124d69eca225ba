"""Refusals: why a turn has no place or no conversation, as errors that leave the gateway."""

from placement.fleet.answers import Refusal, RefusalReason
from router.answer_store import ChainEnd
from router.errors import (
    ApiError,
    BadRequest,
    ContextTooLong,
    DirectoryUnreachable,
    NotFound,
    PayloadTooLarge,
    TooManyRequests,
    Unavailable,
)


def no_such_history(end: ChainEnd, conversation: str | None, most_answers: int, most_bytes: int) -> ApiError:
    """Of what a request goes on from: an answer, or the newest one of a `conversation`."""
    param = "conversation" if conversation else "previous_response_id"
    do = "send the messages that matter as input"
    if conversation:
        do += f", or DELETE /v1/conversations/{conversation[:100]} to begin it anew"
    if end is ChainEnd.TOO_MANY:
        said = f"the history has more than {most_answers} answers, which is more than can be sent again: {do}"
        return BadRequest(said, param=param, code="history_too_long")
    if end is ChainEnd.TOO_LARGE:
        said = f"the history and this request have more than {most_bytes} bytes together: {do}"
        return PayloadTooLarge(said, param=param, code="history_too_large")
    whys = {
        ChainEnd.DELETED: "an answer of that history was deleted, and nothing goes on from it",
        ChainEnd.GONE: "the beginning of that history is not stored any more",
    }
    unknown = "no such response is stored: it was long ago, or never"
    if conversation:
        unknown = "the newest answer of that conversation is not stored any more"
    why = whys.get(end, unknown)
    return NotFound(f"{why}; {do}", param=param, code="previous_response_not_found")


def refused(refusal: Refusal) -> ApiError:
    retry = refusal.retry_after_s or None
    if refusal.reason is RefusalReason.TOO_LARGE:
        return ContextTooLong(refusal.message)
    if refusal.reason in (RefusalReason.NO_CAPACITY, RefusalReason.SATURATED):
        return TooManyRequests(refusal.message, code=refusal.reason, retry_after_s=retry)
    return Unavailable(refusal.message, code=refusal.reason, retry_after_s=retry)


def unreachable(wrong: DirectoryUnreachable) -> ApiError:
    return Unavailable(
        f"new conversations cannot be placed now: {wrong}; those that run go on, try again",
        code="no_directory",
        retry_after_s=wrong.retry_after_s,
    )
