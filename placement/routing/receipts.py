"""Answers of the placer: a receipt, which says why a conversation went where it went, or a refusal.

Receipts are named tuples, not dataclasses: eight options are made for every first turn, and a frozen
dataclass costs three times as much to make.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from placement.overload.signal import OverloadReason


class Why(StrEnum):
    FINISHES_FIRST = "finishes_first"  # prefiller: queue plus curve is the shortest
    NO_PREFILLER_UP = "no_prefiller_up"  # the decoder computes the prompt itself, by the fleet's setting
    HAS_BEGINNING = "has_beginning"  # prefiller: it has some of the prompt, and is about as soon
    KEEPS_BEGINNINGS = "keeps_beginnings"  # prefiller: what others begin with gives way on the one before it
    SOONER_ON_DECODER = "sooner_on_decoder"  # elastic: there its first token comes first
    PREFILLERS_SATURATED = "prefillers_saturated"  # elastic: queues are too long, a decoder has time
    PREFILLERS_BUSY = "prefillers_busy"  # a large later turn stays on its decoder: the queues are too long
    PREFILLED_LOCALLY = "prefilled_locally"  # the placing policy prefills this turn where it decodes
    SHARES_LAYERS = "shares_layers"  # no KV is brought to a decoder that is split: it computes the prompt
    RESTORED = "restored"  # another decoder had this conversation: the shared tier has its KV
    LAST_RESORT = "last_resort"  # a prefiller holds the conversation: it fits on no decoder
    LEAST_KV_IN_USE = "least_kv_in_use"  # decoder
    SOONER_WITH_CAPACITY = "sooner_with_capacity"  # decoder, elastic: of those with capacity, clearly sooner
    HAS_TIME = "has_time"  # decoder, elastic: prefillers have none, nor has the one that was to hold it
    PREFERRED = "preferred"  # decoder of the parent or of the fork's origin, where it fits
    BOUND = "bound"  # decoder: a later turn of a conversation never moves


class PrefillerOption(NamedTuple):
    engine: str
    wait_s: float
    prefill_s: float
    cached_tokens: int = 0  # of the prompt, that it has already


class PrefillerChoice(NamedTuple):
    why: Why
    chosen: PrefillerOption | None
    runners_up: tuple[PrefillerOption, ...]
    considered: int


class DecoderOption(NamedTuple):
    engine: str
    kv_in_use: int  # tokens held for live conversations, reservations included, before this one
    limit: int  # tokens it may hold


class DecoderChoice(NamedTuple):
    """`runners_up` are the least loaded of the others it fits on, in order: none of those that are not listed
    had less in use than the last of them."""

    why: Why
    chosen: DecoderOption
    runners_up: tuple[DecoderOption, ...]
    considered: int
    without_capacity: int  # full, draining, or too small


LOCAL_COST = 1.05


class Estimates(NamedTuple):
    """Seconds until the first token, from now."""

    local_s: float  # computed on its decoder; infinite where nothing is known of how fast that is
    remote_s: float | None  # on a prefiller; None where none takes prompts

    @property
    def local_first(self) -> bool:
        """Somewhat sooner is not enough: a prompt on a decoder slows the turns that run there."""
        return self.remote_s is None or self.local_s * LOCAL_COST <= self.remote_s


class Receipt(NamedTuple):
    policy: str
    at: float
    prompt_tokens: int
    reserved_tokens: int
    prefiller: PrefillerChoice
    decoder: DecoderChoice
    estimates: Estimates | None = None  # where the turn could have been computed on either
    overload: OverloadReason | None = None  # while the decoders' KV is overloaded

    def to_json(self) -> dict[str, Any]:
        """Nested plain data: names for fields, lists for the runners-up."""
        return {name: _plain(value) for name, value in self._asdict().items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if value == inf:
        return None
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


class RefusalReason(StrEnum):
    NO_DECODER = "no_decoder"  # none is up
    NO_PREFILLER = "no_prefiller"  # none is up, and decoders may not prefill long prompts
    NO_CAPACITY = "no_capacity"  # every decoder's KV is in use
    SATURATED = "saturated"  # every prefiller's queue is too long
    TOO_LARGE = "too_large"  # no decoder of this fleet can ever hold it


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RefusalReason
    message: str
    retry_after_s: float  # 0 where trying again cannot help


MESSAGES = {
    RefusalReason.NO_DECODER: "no decoder of this fleet is up; try again when its engines have started "
    "(`conserve status`)",
    RefusalReason.NO_PREFILLER: "no prefiller of this fleet is up; try again when its engine has restarted "
    "(`conserve status`)",
    RefusalReason.TOO_LARGE: "the conversation needs {tokens} tokens of KV, more than any decoder of this "
    "fleet may hold; shorten the prompt",
    RefusalReason.NO_CAPACITY: "{tokens} more tokens of KV fit on none of {decoders} decoders; end "
    "conversations that are over (DELETE /v1/conversations/{{id}}), try again in {retry_s:.0f} s, or add "
    "decoders",
    RefusalReason.SATURATED: "the shortest prefill queue is {wait_s:.1f} s long and the fleet allows "
    "{limit_s:.1f} s; try again in {retry_s:.1f} s, or add prefillers",
}


def refuse(reason: RefusalReason, retry_after_s: float, **facts: float) -> Refusal:
    return Refusal(reason, MESSAGES[reason].format(retry_s=retry_after_s, **facts), retry_after_s)
