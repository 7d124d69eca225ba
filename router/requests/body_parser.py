"""Parses, checks and hashes request bodies. All functions work on plain data and can run in any process.

The cost of a body is known before it is parsed, from its bytes and brackets. A costly one is parsed in
another process (`parser_pool.py`). Sizes are checked before anything is hashed: a prompt that no engine can
hold is refused by its length alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson
from xxhash import xxh3_128_digest

from router.errors import BadRequest, ModelNotFound, excerpt
from router.identity import prefix_chain as chains
from router.identity.conversation_ids import ExplicitIdentity, explicit_identity
from router.identity.prefix_chain import Chain
from router.requests.body_spans import Span, cut_fields, find_fields, find_items, write_items
from router.requests.cost_limits import PromptLimit, check_answers, token_ids
from router.requests.fields import UnknownFields, check_fields, known_part, with_fields
from router.requests.grammars import Grammar, grammar_of
from router.requests.hints import Hints, parse_hints

CHEAP_BYTES = 256 * 1024
CHEAP_MARKS = 4_000  # most arrays and objects of a cheap body
MOST_MARKS = 1_000_000  # most arrays and objects of any body: parsed, they take far more memory than as text
MOST_ITEMS = 10_000  # most messages with their parts, prompts, or tools
DEEPEST = 200  # nested arrays and objects; an engine's parser fails at some 900
_LISTS = frozenset({"messages", "input", "system", "tools", "prompt"})  # fields that may be long lists
_RENDERED = ("documents", "chat_template_kwargs")
_SMALL = 16 * 1024  # bytes of a field that is returned from a large body

_TARGETS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_PROMPT_FIELD = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


class Api(StrEnum):
    """The APIs whose requests are turns."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's

    @property
    def target(self) -> bytes:
        return _TARGETS[self.value].encode()

    @property
    def operation(self) -> str:
        """Return the operation's name in OpenTelemetry's conventions."""
        return "text_completion" if self is Api.COMPLETIONS else "chat"


@dataclass(frozen=True, slots=True)
class BodyParser:
    """Parser of one request's body, with what it has to know about the request and the fleet."""

    path: str  # path of the endpoint
    api: Api | None  # None: not a turn, the body is only checked
    headers: Mapping[str, str]
    space: str  # scope of the caller's conversation ids
    models: frozenset[str]  # names and aliases of the models
    limit: PromptLimit
    items: bool = False  # return the items of `input` too, if the answer is stored or continues another
    unknown: UnknownFields = UnknownFields.DROP

    def parse(self, pieces: Sequence[bytes]) -> "ParsedBody":
        return parse_body(self, pieces)


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """Result of parsing a body: its checked fields, and facts about its prompt."""

    fields: Mapping[str, Any]  # by name; large values of a large body are None
    prompt: "Prompt | None"  # None for requests that are no turns
    grammar: Grammar | None
    ignored: tuple[str, ...]  # names of unknown fields and tools, which engines do not get
    kept: bytes | tuple[Span, ...]  # the body without `ignored`; for a large body, where its known fields are
    replaced: Mapping[str, Any]  # in a large body: new values of fields that had unknown tools
    items: bytes | Span  # items of the Responses API, or their place in a large body without unknown fields

    def known_part(self, pieces: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """Return the bytes of this body, which was given in `pieces`, without its unknown fields."""
        if not self.ignored:
            return pieces
        if isinstance(self.kept, bytes):
            return (self.kept,)
        return with_fields(cut_fields(pieces, self.kept), self.replaced)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Facts about a turn's prompt that a gateway needs: hashes, sizes and hints."""

    identity: ExplicitIdentity
    chain: Chain
    tool_bytes: int  # bytes of tool definitions, which belong to the prompt and to no message
    tools_digest: bytes
    authors: bytes  # author of each message (`prefix_chain.message_authors`)
    exact_tokens: int | None  # length of a prompt of token ids; None for text
    hints: Hints
    prefixes: tuple[tuple[bytes, int], ...] = ()  # digest and size of the prompt up to each early message
    template_bytes: int = 0  # bytes of documents and arguments that the chat template may render
    answers: int = 1  # answers that the request asks for, to all of its prompts


def is_cheap(pieces: Sequence[bytes]) -> bool:
    """Return whether a body can be parsed in the event loop without stalling it."""
    if sum(map(len, pieces)) > CHEAP_BYTES:
        return False
    return sum(piece.count(b"{") + piece.count(b"[") for piece in pieces) <= CHEAP_MARKS


def parse_body(parser: BodyParser, pieces: Sequence[bytes]) -> ParsedBody:
    """Parse and check a body. Raises ApiError, which the client gets."""
    raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    body = _parse_object(parser.headers, raw)
    if parser.api is not None or "model" in body:
        check_model(body, parser.models)
    check_items(body)
    ignored = check_fields(parser.path, body, parser.unknown)
    is_large = len(raw) > CHEAP_BYTES
    kept: bytes | tuple[Span, ...] = b""
    replaced: dict[str, Any] = {}
    if ignored:
        sent, body = body, known_part(parser.path, body)
        if is_large:
            replaced = {name: value for name, value in body.items() if value is not sent[name]}
            kept = find_fields(raw, body.keys() - replaced.keys())
            raw = b"".join(cut_fields((raw,), kept))
        else:
            raw = kept = orjson.dumps(body)
    parser.limit.check(parser.path, body)
    answers = check_answers(body, parser.limit.max_answers)
    prompt = _prompt(parser, parser.api, body, answers) if parser.api is not None else None
    continues = body.get("previous_response_id") or body.get("conversation")
    items: bytes | Span = b""
    if parser.items and (continues or body.get("store") is not False):
        items = find_items(raw) if is_large else write_items(body.get("input"))
    grammar = grammar_of(body)
    if is_large:
        body = {name: value if _is_small(value) else None for name, value in body.items()}
    return ParsedBody(body, prompt, grammar, ignored, kept, replaced, items)


def _prompt(parser: BodyParser, api: Api, body: Mapping[str, Any], answers: int) -> Prompt:
    field = _PROMPT_FIELD[api]
    pointer = next((name for name in ("previous_response_id", "conversation") if body.get(name)), None)
    if body.get("service_tier") == "flex" and api is Api.RESPONSES and pointer:
        raise BadRequest("offline work belongs to no conversation: send the messages instead", param=pointer)
    if field not in body and not (api is Api.RESPONSES and pointer):
        raise BadRequest(f"{field} is missing", param=field)
    tools = body.get("tools")
    definitions = _dump("tools", tools) if tools else b""
    user = body.get("user")
    seed = chains.seed(parser.space, str(body["model"]), user if isinstance(user, str) else "")
    identity = explicit_identity(parser.headers, body)
    tools_digest = xxh3_128_digest(definitions)
    start, messages = chains.of_group(seed, identity.group), chains.messages_of(body)
    return Prompt(
        identity=identity,
        chain=chains.of_messages(start, messages) if messages is not None else chains.of_prompt(start, body),
        tool_bytes=len(definitions),
        tools_digest=tools_digest,
        authors=chains.message_authors(messages or ()),
        exact_tokens=len(ids) if (ids := token_ids(body.get("prompt"))) is not None else None,
        hints=parse_hints(parser.headers, body),
        prefixes=chains.prefixes_of(tools_digest, messages or ()),
        template_bytes=sum(len(_dump(name, body[name])) for name in _RENDERED if body.get(name)),
        answers=answers,
    )


def check_items(body: Mapping[str, Any]) -> None:
    """Refuse a body of any endpoint with too many messages, tools or prompts, or with a part's `uuid`.

    An engine looks up a part with a `uuid` in its caches by the `uuid` alone, whoever sent that part first.
    """
    for field in body.keys() & _LISTS:
        value = body[field]
        if not isinstance(value, list) or token_ids(value) is not None:
            continue
        parts = list(_parts(value))
        if (items := len(value) + len(parts)) > MOST_ITEMS:
            raise BadRequest(f"{field} has {items} items and parts; it may have {MOST_ITEMS}", param=field)
        if any(isinstance(part, dict) and part.get("uuid") is not None for part in parts):
            text = "a part of a message must not have a uuid: leave it out, media are known by their content"
            raise BadRequest(text, param=f"{field}.content.uuid")


def _parts(messages: list[object]) -> Iterator[object]:
    """Yield the content parts of messages, and those of tool outputs among the messages."""
    for message in messages:
        if isinstance(message, dict):
            for content in (message.get("content"), message.get("output")):
                if isinstance(content, list):
                    yield from content


def _is_small(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= _SMALL
    try:
        return not isinstance(value, dict | list) or len(orjson.dumps(value)) <= _SMALL
    except TypeError:  # nested deeper than orjson writes
        return False


def _dump(name: str, value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (TypeError, ValueError):
        raise BadRequest(f"{name} is nested too deeply", param=name) from None


def _parse_object(headers: Mapping[str, str], raw: bytes) -> dict[str, Any]:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadRequest(
            f"the body must be application/json, not {excerpt(media_type) or 'of no type'}",
            param="content-type",
        )
    if len(raw) > CHEAP_BYTES and raw.count(b"{") + raw.count(b"[") > MOST_MARKS:
        raise BadRequest(f"the body has more than {MOST_MARKS} arrays and objects")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if raw.count(b"{") + raw.count(b"[") > DEEPEST and is_deep(body):
        raise BadRequest(f"the body nests more than {DEEPEST} arrays and objects")
    return body


def is_deep(value: dict[str, Any]) -> bool:
    """Return whether a value is nested more deeply than `DEEPEST`.

    It goes through the value level by level, because a recursion into a deep value would exceed the stack.
    """
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        children = (one.values() if isinstance(one, dict) else one for one in level)
        level = [part for parts in children for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def check_model(body: Mapping[str, Any], models: frozenset[str]) -> None:
    """Refuse a body that names no model, or a model that the caller may not use."""
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest("model must be the name of a model (GET /v1/models lists them)", param="model")
    if name not in models:
        raise ModelNotFound(
            f"the model {excerpt(name)!r} does not exist; GET /v1/models lists those that do", param="model"
        )
