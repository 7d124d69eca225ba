"""Refusals: why a turn has no place or no conversation, as errors that leave the gateway."""

from placement.fleet.answers import Refusal, RefusalReason
from router.errors import (
    ApiError,
    ContextTooLong,
    DirectoryUnreachable,
    NotFound,
    TooManyRequests,
    Unavailable,
)


def no_such_response() -> NotFound:
    return NotFound(
        "no conversation has that response; it has ended, or never was: send its messages again",
        param="previous_response_id",
        code="previous_response_not_found",
    )


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
