"""When a conversation cannot be placed now: why, what to do about it, and when to try again."""

from dataclasses import dataclass
from enum import StrEnum


class RefusalReason(StrEnum):
    NO_DECODER = "no_decoder"  # none is up
    NO_PREFILLER = "no_prefiller"  # none is up, and decoders may not prefill long prompts
    NO_ROOM = "no_room"  # every decoder's KV is in use
    SATURATED = "saturated"  # every prefiller's queue is too long
    TOO_LARGE = "too_large"  # no decoder of this fleet can ever hold it


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RefusalReason
    message: str
    retry_after_s: float  # 0 where trying again cannot help


def no_decoder(retry_after_s: float) -> Refusal:
    return Refusal(
        RefusalReason.NO_DECODER,
        "no decoder of this fleet is up; try again when its engines have started (`conserve status`)",
        retry_after_s,
    )


def no_prefiller(retry_after_s: float) -> Refusal:
    return Refusal(
        RefusalReason.NO_PREFILLER,
        "no prefiller of this fleet is up; try again when its engine has restarted (`conserve status`)",
        retry_after_s,
    )


def too_large(tokens: int) -> Refusal:
    return Refusal(
        RefusalReason.TOO_LARGE,
        f"the conversation needs {tokens} tokens of KV, more than any decoder of this fleet may hold; "
        "shorten the prompt",
        0.0,
    )


def no_room(tokens: int, decoders: int, retry_after_s: float) -> Refusal:
    return Refusal(
        RefusalReason.NO_ROOM,
        f"none of {decoders} decoders has room for {tokens} more tokens of KV; end conversations "
        f"that are over (DELETE /v1/conversations/{{id}}), try again in {retry_after_s:.0f} s, or add "
        "decoders",
        retry_after_s,
    )


def saturated(wait_s: float, limit_s: float) -> Refusal:
    # The queue is a known number of seconds long, so the time at which it is short enough again is known.
    retry_after_s = wait_s - limit_s
    return Refusal(
        RefusalReason.SATURATED,
        f"the shortest prefill queue is {wait_s:.1f} s long and the fleet allows {limit_s:.1f} s; "
        f"try again in {retry_after_s:.1f} s, or add prefillers",
        retry_after_s,
    )
