"""A receipt says why a conversation went where it went, small enough to keep with every binding.

Named tuples, not dataclasses: eight options are made for every first turn, and a frozen dataclass costs three
times as much to make.
"""

from enum import StrEnum
from typing import Any, NamedTuple


class Why(StrEnum):
    FINISHES_FIRST = "finishes_first"  # prefiller: queue plus curve is the shortest
    NO_PREFILLER_UP = "no_prefiller_up"  # the decoder computes the prompt itself, by the fleet's setting
    PREFILLERS_BUSY = "prefillers_busy"  # a large later turn stays on its decoder: the queues are too long
    PREFILLED_LOCALLY = "prefilled_locally"  # the placing policy prefills this turn where it decodes
    RESTORED = "restored"  # another decoder had this conversation: the shared tier has its KV
    LEAST_KV_IN_USE = "least_kv_in_use"  # decoder
    PREFERRED = "preferred"  # decoder of the parent or of the fork's origin, which had room
    BOUND = "bound"  # decoder: a later turn of a conversation never moves


class PrefillerOption(NamedTuple):
    engine: str
    wait_s: float
    prefill_s: float


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
    """`runners_up` are the least loaded of the others with room, in order: no decoder with room that is
    not listed had less in use than the last of them."""

    why: Why
    chosen: DecoderOption
    runners_up: tuple[DecoderOption, ...]
    considered: int
    without_room: int  # full, draining, or too small


class Receipt(NamedTuple):
    policy: str
    at: float
    prompt_tokens: int
    reserved_tokens: int
    prefiller: PrefillerChoice
    decoder: DecoderChoice

    def to_json(self) -> dict[str, Any]:
        """Nested plain data: names for fields, lists for the runners-up."""
        return {name: _plain(value) for name, value in self._asdict().items()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
