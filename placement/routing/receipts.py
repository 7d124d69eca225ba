"""Answers of the placer: a receipt that explains a placement, or a refusal.

Receipts are named tuples because every first turn makes eight options, and a frozen dataclass takes three
times as long to create.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from placement.overload.signal import OverloadReason


class Why(StrEnum):
    """Reason for a choice, as receipts and metrics name it."""

    # Why this prefiller computes the prompt.
    FINISHES_FIRST = "finishes_first"  # its queue and its prefill take the least time
    HAS_PREFIX = "has_prefix"  # it has cached a prefix of the prompt, and finishes about as soon
    # Why no prefiller computes the prompt.
    NO_PREFILLER_UP = "no_prefiller_up"  # the decoder computes the prompt instead
    SOONER_ON_DECODER = "sooner_on_decoder"  # elastic: the decoder's first token would be clearly sooner
    TTFT_AT_RISK = "ttft_at_risk"  # elastic: the prefiller would risk the target, the decoder is sooner
    PREFILLERS_SATURATED = "prefillers_saturated"  # elastic: prefill queues are too long, a decoder has time
    PREFILLERS_BUSY = "prefillers_busy"  # a later turn with much to compute: prefill queues are too long
    PREFILLED_LOCALLY = "prefilled_locally"  # the policy prefills this turn on its decoder
    SHARES_LAYERS = "shares_layers"  # a decoder that shares its layers cannot receive KV
    RESTORED = "restored"  # the decoder finds the KV that another decoder computed in the shared tier
    HAS_KV = "has_kv"  # a move: the conversation's former decoder has the KV and sends it
    # Why this engine holds the conversation.
    LEAST_KV_IN_USE = "least_kv_in_use"
    SOONER_WITH_CAPACITY = "sooner_with_capacity"  # elastic: it computes the prompt clearly sooner
    HAS_TIME = "has_time"  # elastic: prefillers are saturated, and so is the decoder with the least KV
    PREFERRED = "preferred"  # the decoder of the conversation's parent
    WAITS_LESS = "waits_less"  # a move: prompts wait less there than on the hot decoder
    IDLE_PREFILLER = "idle_prefiller"  # elastic roles: a prefiller that idles while prompts wait on decoders
    LAST_RESORT = "last_resort"  # elastic: a prefiller, because the conversation fits on no decoder
    BOUND = "bound"  # a later turn stays on its decoder


class PrefillerOption(NamedTuple):
    engine: str
    wait_s: float
    prefill_s: float
    cached_tokens: int = 0  # tokens of the prompt that the engine has cached


class PrefillerChoice(NamedTuple):
    why: Why
    chosen: PrefillerOption | None
    runners_up: tuple[PrefillerOption, ...]
    considered: int

    @classmethod
    def none(cls, why: Why) -> "PrefillerChoice":
        """Return a choice of no prefiller, made without considering any."""
        return cls(why, None, (), 0)

    def rejected(self, why: Why) -> "PrefillerChoice":
        """Return the choice without its prefiller, which becomes the first runner-up."""
        seen = (self.chosen, *self.runners_up) if self.chosen else self.runners_up
        return PrefillerChoice(why, None, seen, self.considered)

    def replaced(self, best: PrefillerOption, why: Why) -> "PrefillerChoice":
        """Return the choice with the prefiller `best`; the former choice becomes a runner-up."""
        seen = filter(None, (self.chosen, *self.runners_up))
        others = tuple(one for one in seen if one.engine != best.engine)
        return PrefillerChoice(why, best, others, self.considered)


class DecoderOption(NamedTuple):
    engine: str
    kv_in_use: int  # tokens held or reserved for live conversations, without the one to be placed
    limit: int  # tokens that it may hold


class DecoderChoice(NamedTuple):
    """Chosen decoder, and the decoders that would have been chosen next."""

    why: Why
    chosen: DecoderOption
    runners_up: tuple[DecoderOption, ...]
    considered: int
    without_capacity: int  # decoders that are full, draining or too small

    def replaced(self, best: DecoderOption, why: Why) -> "DecoderChoice":
        """Return the choice with the decoder `best`; the former choice becomes a runner-up."""
        seen = (self.chosen, *self.runners_up)
        others = tuple(one for one in seen if one.engine != best.engine)
        return self._replace(why=why, chosen=best, runners_up=others)


class Estimates(NamedTuple):
    """Estimated seconds from now until the first token."""

    local_s: float  # if the decoder computes the prompt; infinite where its speed is unknown
    remote_s: float | None  # if a prefiller computes the prompt; None where no prefiller accepts prompts


class MoveReason(StrEnum):
    DRAIN = "drain"  # its decoder will end: an upgrade, fewer replicas, or a signal
    HOT = "hot"  # prompts wait on its decoder, and much less on another decoder


class Move(NamedTuple):
    """Move of a conversation away from the decoder that it was bound to."""

    reason: MoveReason
    source: str  # the former decoder
    context_tokens: int  # tokens of the conversation's context
    sends: bool  # False: the former decoder cannot send KV, so that the context is computed again
    waits_s: tuple[float, float] | None = None  # estimated waits of prompts on the target and the hot source


class Receipt(NamedTuple):
    policy: str
    at: float
    prompt_tokens: int
    reserved_tokens: int
    prefiller: PrefillerChoice
    decoder: DecoderChoice
    estimates: Estimates | None = None  # set where the decoder and prefillers were compared
    overload: OverloadReason | None = None  # set while the decoders' KV is overloaded
    move: Move | None = None  # set where the conversation moves from another decoder

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as nested plain data: field names as keys, runners-up as lists."""
        return {name: _plain(value) for name, value in self._asdict().items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if value == inf:
        return None
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class Placement:
    """Engines that serve a turn."""

    prefiller: str | None  # in a move, the decoder that sends the KV; None: the decoder computes the prompt
    decoder: str
    receipt: Receipt


class RefusalReason(StrEnum):
    NO_DECODER = "no_decoder"  # no decoder is up
    NO_CAPACITY = "no_capacity"  # every decoder's KV is in use
    SATURATED = "saturated"  # every prefiller's queue is too long
    TOO_LARGE = "too_large"  # no decoder of this fleet can ever hold the conversation


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: RefusalReason
    message: str
    retry_after_s: float  # 0 where trying again cannot help


MESSAGES = {
    RefusalReason.NO_DECODER: "no decoder of this fleet is up; try again when its engines have started "
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
