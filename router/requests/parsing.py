"""Requests of turns, read: bodies parsed, checked and hashed, and hints, by functions of plain data.

What reading a body costs is known before: by its bytes and brackets. A costly one is read in a process of its
own (`router/requests/parser_pool.py`), since parsing holds the interpreter. Sizes are checked before
anything is hashed: a prompt that no engine could hold has more text than the context's tokens can spell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import orjson
from xxhash import xxh3_128_digest

from router.errors import BadRequest, ModelNotFound
from router.gateway.responses.items import Span, find_items, write_items
from router.identity import prefix_chain as chains
from router.identity.conversation_ids import Explicit, explicit_identity
from router.identity.prefix_chain import Chain
from router.requests.fields import check_fields
from router.requests.grammars import Grammar, grammar_of
from router.requests.prompt_limit import PromptLimit, token_ids

HIGHEST_PRIORITY = 10
LONGEST_HINT_S = 7 * 24 * 3600.0
_MAX_ACTIONS = 16
_TRUE = frozenset({"1", "true", "yes"})
HINT_FIELDS = frozenset({"kv_hints", "nvext", "slo_class"})  # of a body, for us: no engine sees them


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says about its conversation beside the prompt, wherever it says it.

    As headers, as actions of vLLM's `kv_hints` envelope, or as Dynamo's `nvext.agent_hints`, in this order of
    precedence. None is needed, each is bounded here, and none says how long an answer will be.
    """

    final: bool = False  # this turn is the last
    away_s: float | None = None  # the tools that it calls take so long: park now, restore in time
    keep_s: float | None = None  # stay on the accelerator for so long after this turn
    ttl_s: float | None = None  # of silence, after which the conversation ends
    priority: int = 0  # among turns that wait; higher goes first
    placement: bool = False  # the answer is to say where it was computed, and why there
    resume: bool = True  # a stream whose engine ends goes on elsewhere

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
    if number is None or not 0 < number <= LONGEST_HINT_S:
        raise BadRequest(f"{source} must be seconds, above 0 and at most {LONGEST_HINT_S:g}", param=source)
    return number


def _level(source: str, value: Any) -> int:
    number = _number(value)
    if number is None or not number.is_integer() or abs(number) > HIGHEST_PRIORITY:
        allowed = f"a whole number from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
        raise BadRequest(f"{source} must be {allowed}", param=source)
    return int(number)


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


CHEAP_BYTES = 256 * 1024
CHEAP_MARKS = 4_000  # arrays and objects of a cheap body
MOST_MARKS = 1_000_000  # beyond it a body's memory is many times its bytes
MOST_ITEMS = 10_000  # messages of a prompt and parts of them, or tools
MOST_PROMPTS = 1_024  # of one request: each is one of the engine's
DEEPEST = 200  # arrays and objects in one another: an engine's parser gives up at some 900
_SMALL = 16 * 1024  # of a field's value, to be of use beside the prompt

_TARGETS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_PROMPT_FIELD = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


class Api(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's

    @property
    def target(self) -> bytes:
        return _TARGETS[self.value].encode()

    @property
    def operation(self) -> str:
        """In OpenTelemetry's words."""
        return "text_completion" if self is Api.COMPLETIONS else "chat"


@dataclass(frozen=True, slots=True)
class Reading:
    """What is asked of the reader of a body."""

    path: str  # of the endpoint
    api: Api | None  # None: it is no turn, and only checked
    headers: Mapping[str, str]
    space: str  # scope of the caller's conversation ids
    models: frozenset[str]  # by every name they answer to
    limit: PromptLimit
    items: bool = False  # those of the input are asked, unless nobody is to have them

    def read(self, pieces: Sequence[bytes]) -> "ReadBody":
        return read_body(self, pieces)


@dataclass(frozen=True, slots=True)
class ReadBody:
    """What is known of a body that was read."""

    fields: Mapping[str, Any]  # by name; None in the place of what is large
    prompt: "Prompt | None"  # of a turn
    grammar: Grammar | None = None
    items: bytes | Span = b""  # of the Responses API; of a large body, where they stand


@dataclass(frozen=True, slots=True)
class Prompt:
    seed: bytes
    identity: Explicit
    chain: Chain
    tool_bytes: int  # of tool definitions, which are part of the prompt and of no message
    tools_digest: bytes
    marks: bytes  # of each message: who wrote it (`chains.marks_of`)
    exact_tokens: int | None  # known without asking when the prompt is token ids
    hints: Hints
    prefixes: tuple[tuple[bytes, int], ...] = ()  # up to each of its first messages: digest, bytes


def is_cheap(pieces: Sequence[bytes]) -> bool:
    """Whether reading it takes no longer than a loop may stand still."""
    if sum(map(len, pieces)) > CHEAP_BYTES:
        return False
    return sum(piece.count(b"{") + piece.count(b"[") for piece in pieces) <= CHEAP_MARKS


def read_body(asked: Reading, pieces: Sequence[bytes]) -> ReadBody:
    """Raises what the client did wrong."""
    raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    body = _object(asked.headers, raw)
    if asked.api is not None or "model" in body:
        check_model(body, asked.models)
    check_items(body)
    check_fields(asked.path, body)
    asked.limit.check(asked.path, body)
    prompt = _prompt(asked, asked.api, body) if asked.api is not None else None
    alone = body.get("store") is False and not (body.get("previous_response_id") or body.get("conversation"))
    items: bytes | Span = b""
    if asked.items and not alone:
        items = find_items(raw) if len(raw) > CHEAP_BYTES else write_items(body.get("input"))
    grammar = grammar_of(body)
    if len(raw) > CHEAP_BYTES:
        body = {name: value if _is_small(value) else None for name, value in body.items()}
    return ReadBody(body, prompt, grammar, items)


def _prompt(asked: Reading, api: Api, body: Mapping[str, Any]) -> Prompt:
    field = _PROMPT_FIELD[api]
    pointer = next((name for name in ("previous_response_id", "conversation") if body.get(name)), None)
    if body.get("service_tier") == "flex" and api is Api.RESPONSES and pointer:
        raise BadRequest("offline work belongs to no conversation: send the messages instead", param=pointer)
    if field not in body and not (api is Api.RESPONSES and pointer):
        raise BadRequest(f"{field} is missing", param=field)
    tools = body.get("tools")
    definitions = _written("tools", tools) if tools else b""
    user = body.get("user")
    seed = chains.seed(asked.space, str(body["model"]), user if isinstance(user, str) else "")
    identity = explicit_identity(asked.headers, body)
    tools_digest = xxh3_128_digest(definitions)
    return Prompt(
        seed=seed,
        identity=identity,
        chain=chains.of_body(chains.of_group(seed, identity.group), body),
        tool_bytes=len(definitions),
        tools_digest=tools_digest,
        marks=chains.marks_of(body),
        exact_tokens=len(ids) if (ids := token_ids(body.get("prompt"))) is not None else None,
        hints=read_hints(asked.headers, body),
        prefixes=chains.prefixes_of(tools_digest, body),
    )


def check_items(body: Mapping[str, Any]) -> None:
    """Of whatever endpoint."""
    for field in ("messages", "input", "system", "tools", "prompt"):
        value = body.get(field)
        if not isinstance(value, list):
            continue
        if token_ids(value) is not None:
            continue
        items, most = (len(value), MOST_PROMPTS) if field == "prompt" else (_items(value), MOST_ITEMS)
        if items > most:
            raise BadRequest(f"{field} has {items} items and parts; it may have {most}", param=field)
    counts = (body.get(name) for name in ("n", "best_of"))
    answers = max((count for count in counts if isinstance(count, int | float)), default=1)
    if (prompts := prompts_of(body)) > 1 and prompts * answers > MOST_PROMPTS:
        asked = f"{prompts} prompts with {answers} answers each"
        raise BadRequest(f"a request may have {MOST_PROMPTS} answers in all, not {asked}", param="n")


def prompts_of(body: Mapping[str, Any]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and token_ids(prompt) is None else 1


def _items(messages: list[object]) -> int:
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    return len(messages) + sum(len(content) for content in contents if isinstance(content, list))


def _is_small(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _SMALL
    try:
        return not isinstance(value, dict | list) or len(orjson.dumps(value)) <= _SMALL
    except TypeError:  # nested deeper than it writes
        return False


def _written(name: str, value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        raise BadRequest(f"{name} is nested too deeply", param=name) from None


def _object(headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(
            f"the body must be application/json, not {kind or 'of no type'}", param="content-type"
        )
    if len(raw) > CHEAP_BYTES and raw.count(b"{") + raw.count(b"[") > MOST_MARKS:
        raise BadRequest(f"the body has more than {MOST_MARKS} arrays and objects")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as wrong:
        raise BadRequest(f"the body is not JSON: {wrong.msg} at byte {wrong.pos}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > DEEPEST and is_deep(body):
        raise BadRequest(f"the body has more than {DEEPEST} arrays and objects in one another")
    return body


def is_deep(value: dict[str, Any]) -> bool:
    """Level by level: what is nested deeply would exceed Python's own stack, too."""
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        below = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for parts in below for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def check_model(body: Mapping[str, Any], models: frozenset[str]) -> None:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest("model must be the name of a model (GET /v1/models lists them)", param="model")
    if name not in models:
        raise ModelNotFound(
            f"the model {name[:100]!r} does not exist; GET /v1/models lists those that do", param="model"
        )
