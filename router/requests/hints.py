"""Hints that a client gives about its conversation: when it ends, how long it pauses, how urgent it is."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from router.errors import BadRequest

HINT_FIELDS = frozenset({"kv_hints", "nvext", "slo_class"})  # body fields that engines do not get
HIGHEST_PRIORITY = 10
LONGEST_HINT_S = 7 * 24 * 3600.0
_MAX_ACTIONS = 16
_TRUE = frozenset({"1", "true", "yes"})


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one turn. Every hint is optional, and its value is bounded.

    Clients send them as headers, as actions of vLLM's `kv_hints` envelope, or as Dynamo's
    `nvext.agent_hints`, in this order of precedence.
    """

    final: bool = False  # the conversation ends with this turn
    away_s: float | None = None  # duration of the tool calls that follow: park the KV, and restore it in time
    keep_s: float | None = None  # how long to keep the KV on the accelerator after this turn
    ttl_s: float | None = None  # time without a turn after which the conversation ends
    priority: int = 0  # among waiting turns; higher goes first
    placement: bool = False  # a response header names the engines, and why they were chosen
    resume: bool = True  # continue a stream on another engine when its engine ends

    def capped(self, longest_ttl_s: float) -> "Hints":
        """Return these hints with the time to live limited to the fleet's maximum."""
        return self if self.ttl_s is None else replace(self, ttl_s=min(self.ttl_s, longest_ttl_s))

    @property
    def for_engine(self) -> dict[str, float]:
        """Return the hints for the engine that holds the conversation's KV."""
        park_after_s = 0.0 if self.away_s is not None else self.keep_s
        hints = {"park_after_s": park_after_s, "ttl_s": self.ttl_s}
        return {name: value for name, value in hints.items() if value is not None}


def _flag(source: str, value: Any) -> bool:
    """Return whether a flag is set: by True, 1 or a word of `_TRUE`. Any other value does not set it."""
    return value is True or value == 1 or (isinstance(value, str) and value.strip().lower() in _TRUE)


def _seconds(source: str, value: Any) -> float:
    number = _number(value)
    if number is None or not 0 < number <= LONGEST_HINT_S:
        raise BadRequest(f"{source} must be seconds, above 0 and at most {LONGEST_HINT_S:g}", param=source)
    return number


def _priority(source: str, value: Any) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or abs(number) > HIGHEST_PRIORITY:
        allowed = f"a whole number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
        raise BadRequest(f"{source} must be {allowed}", param=source)
    return int(number)


def _dynamo_priority(source: str, value: Any) -> int:
    """Return a priority of Dynamo clamped to our limits, because Dynamo has none."""
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


_KINDS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {  # field of `Hints` and parser of each kind
    "final": ("final", _flag),
    "away": ("away_s", _seconds),
    "keep": ("keep_s", _seconds),
    "ttl": ("ttl_s", _seconds),
    "priority": ("priority", _priority),
    "placement": ("placement", _flag),
    "resume": ("resume", _flag),
}
HEADERS = {f"x-conversation-{kind}": kind for kind in _KINDS} | {"x-dynamo-session-final": "final"}
_ACTIONS = {f"conversation.{kind}": kind for kind in _KINDS}
_Hint = tuple[str, str, Any]  # where it was found, kind, value


def parse_hints(headers: Mapping[str, str], body: Mapping[str, Any]) -> Hints:
    """Return the hints of a request. Raises BadRequest for a malformed hint."""
    values: dict[str, Any] = {}
    for source, kind, value in (*_nvext(body), *_envelope(body), *_headers(headers)):  # a later one wins
        name, parse = _KINDS[kind]
        values[name] = (_dynamo_priority if source.startswith("nvext") else parse)(source, value)
    return Hints(**values)


def _headers(headers: Mapping[str, str]) -> Iterator[_Hint]:
    for name, kind in HEADERS.items():
        if name in headers:
            yield name, kind, headers[name]


def _envelope(body: Mapping[str, Any]) -> Iterator[_Hint]:
    """Yield the hints among the actions of `kv_hints`, and ignore all other actions.

    An action is `{"action_type": "conversation.away", "payload": {"value": 30}}`.
    """
    envelope = body.get("kv_hints")
    if envelope is None:
        return
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    if not isinstance(actions, list) or len(actions) > _MAX_ACTIONS:
        raise BadRequest(
            f"kv_hints must be vLLM's envelope, with a list of at most {_MAX_ACTIONS} actions",
            param="kv_hints",
        )
    for action in actions:
        if not isinstance(action, dict):
            raise BadRequest("an action of kv_hints must be an object", param="kv_hints.actions")
        action_type = action.get("action_type")
        kind = _ACTIONS.get(action_type) if isinstance(action_type, str) else None
        if kind is None:
            continue
        payload = action.get("payload")
        value = payload.get("value", True) if isinstance(payload, dict) else True
        yield f"kv_hints.{action_type}", kind, value


def _nvext(body: Mapping[str, Any]) -> Iterator[_Hint]:
    """Yield the priority in `nvext`. A `strict_priority` above 0 goes before every other priority."""
    extension = body.get("nvext")
    hints = extension.get("agent_hints") if isinstance(extension, dict) else None
    if not isinstance(hints, dict):
        return
    if hints.get("priority") is not None:
        yield "nvext.agent_hints.priority", "priority", hints["priority"]
    source, tier = "nvext.agent_hints.strict_priority", hints.get("strict_priority")
    if tier is not None and (type(tier) is not int or tier < 0):
        raise BadRequest(f"{source} must be a whole number that is not negative", param=source)
    if tier:
        yield source, "priority", HIGHEST_PRIORITY
