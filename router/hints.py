"""Hints: what a client says about its conversation beside the prompt, wherever it says it.

As headers, as actions of vLLM's `kv_hints` envelope, or as Dynamo's `nvext.agent_hints`, in this order of
precedence. None is needed, each is bounded here, and none says how long an answer will be.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.errors import BadRequest

HIGHEST_PRIORITY = 10
LONGEST_S = 7 * 24 * 3600.0
_MAX_ACTIONS = 16
_MOST_SHARING = 100_000
_TRUE = frozenset({"1", "true", "yes"})
FIELDS = frozenset({"kv_hints", "nvext", "slo_class"})  # of a body, for us: no engine sees them


@dataclass(frozen=True, slots=True)
class Hints:
    final: bool = False  # this turn is the last
    away_s: float | None = None  # the tools that it calls take so long: park now, restore in time
    keep_s: float | None = None  # stay on the accelerator for so long after this turn
    ttl_s: float | None = None  # of silence, after which the conversation ends
    priority: int = 0  # among turns that wait; higher goes first
    placement: bool = False  # the answer is to say where it was computed, and why there
    resume: bool = True  # a stream whose engine ends goes on elsewhere
    sharing: bool = False  # other conversations will begin as this one does

    def within(self, longest_ttl_s: float) -> "Hints":
        """With no more than what the fleet allows."""
        return self if self.ttl_s is None else replace(self, ttl_s=min(self.ttl_s, longest_ttl_s))

    @property
    def for_engine(self) -> dict[str, float]:
        """What the engine that holds the conversation has to know."""
        park_after_s = 0.0 if self.away_s is not None else self.keep_s
        said = {"park_after_s": park_after_s, "ttl_s": self.ttl_s}
        return {name: value for name, value in said.items() if value is not None}


def _flag(source: str, value: Any) -> bool:
    """Anything else is no: clients send `0` and `false`."""
    return value is True or value == 1 or (isinstance(value, str) and value.strip().lower() in _TRUE)


def _seconds(source: str, value: Any) -> float:
    number = _number(value)
    if number is None or not 0 < number <= LONGEST_S:
        raise BadRequest(f"{source} must be seconds, above 0 and at most {LONGEST_S:g}", param=source)
    return number


def _level(source: str, value: Any) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or abs(number) > HIGHEST_PRIORITY:
        allowed = f"a whole number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
        raise BadRequest(f"{source} must be {allowed}", param=source)
    return int(number)


def _any(source: str, value: Any) -> bool:
    """Whether there are: how many there are decides nothing."""
    number = _number(value)
    if number is None or not number.is_integer() or not 0 <= number <= _MOST_SHARING:
        raise BadRequest(f"{source} must be a whole number from 0 to {_MOST_SHARING}", param=source)
    return number > 0


def _clamped(source: str, value: Any) -> int:
    """Dynamo has no bounds."""
    if type(value) is not int:
        raise BadRequest(f"{source} must be a whole number", param=source)
    return max(-HIGHEST_PRIORITY, min(HIGHEST_PRIORITY, value))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


Reader = Callable[[str, Any], Any]
_KINDS: Mapping[str, tuple[str, Reader]] = {  # by the last word of a header or an action: field, reader
    "final": ("final", _flag),
    "away": ("away_s", _seconds),
    "keep": ("keep_s", _seconds),
    "ttl": ("ttl_s", _seconds),
    "priority": ("priority", _level),
    "placement": ("placement", _flag),
    "resume": ("resume", _flag),
    "sharing": ("sharing", _any),
}
HEADERS = {f"x-conversation-{kind}": kind for kind in _KINDS} | {"x-dynamo-session-final": "final"}
_ACTIONS = {f"conversation.{kind}": kind for kind in _KINDS}


def read_hints(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hints:
    said: dict[str, Any] = {}
    for source, kind, value in (*_of_nvext(body), *_of_envelope(body), *_of_headers(headers)):
        name, read = _KINDS[kind]
        said[name] = (_clamped if source.startswith("nvext") else read)(source, value)
    return Hints(**said)


def _of_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for name, kind in HEADERS.items():
        if name in headers:
            yield name, kind, headers[name]


def _of_envelope(body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Actions of other components are none of ours. `{"action_type": "conversation.away", "payload":
    {"value": 30}}` is one that is."""
    envelope = body.get("kv_hints")
    if envelope is None:
        return
    actions = envelope.get("actions") if isinstance(envelope, Mapping) else None
    if not isinstance(actions, list) or len(actions) > _MAX_ACTIONS:
        raise BadRequest(
            f"kv_hints must be vLLM's envelope, with a list of at most {_MAX_ACTIONS} actions",
            param="kv_hints",
        )
    for action in actions:
        if not isinstance(action, Mapping):
            raise BadRequest("an action of kv_hints must be an object", param="kv_hints.actions")
        action_type = action.get("action_type")
        kind = _ACTIONS.get(action_type) if isinstance(action_type, str) else None
        if kind is None:
            continue
        payload = action.get("payload")
        value = payload.get("value", True) if isinstance(payload, Mapping) else True
        yield f"kv_hints.{action_type}", kind, value


def _of_nvext(body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """A `strict_priority` is a tier before all priorities of lower tiers, 0 where there is none."""
    extension = body.get("nvext")
    hints = extension.get("agent_hints") if isinstance(extension, Mapping) else None
    if not isinstance(hints, Mapping):
        return
    if hints.get("priority") is not None:
        yield "nvext.agent_hints.priority", "priority", hints["priority"]
    source, tier = "nvext.agent_hints.strict_priority", hints.get("strict_priority")
    if tier is not None and (type(tier) is not int or tier < 0):
        raise BadRequest(f"{source} must be a whole number that is not negative", param=source)
    if tier:
        yield source, "priority", HIGHEST_PRIORITY
