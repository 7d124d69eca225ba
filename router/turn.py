"""One request of a conversation, read and checked: what the life of a conversation needs to know of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from router.config import GatewayConfig
from router.errors import BadRequest, ModelNotFound
from router.http import Headers, RawHeaders, Request
from router.identity import chain as chains
from router.identity.canonical import TooDeep
from router.identity.chain import Chain
from router.identity.explicit import BadIdentity, Explicit, explicit, is_final

if TYPE_CHECKING:
    from router.tracing import TurnTrace

# What an engine may see of a client's headers: tracing and content negotiation. No keys, no cookies, no ids.
_FORWARDED = frozenset({b"accept", b"content-type", b"traceparent", b"tracestate", b"x-request-id"})
_GENERATES = {
    "chat": b"/v1/chat/completions",
    "completions": b"/v1/completions",
    "responses": b"/v1/responses",
    "messages": b"/v1/messages",
}
_PROMPT_FIELD = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


class Api(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"  # Anthropic's

    @property
    def target(self) -> bytes:
        return _GENERATES[self.value]


@dataclass(frozen=True, slots=True)
class Turn:
    api: Api
    raw: bytes
    body: Mapping[str, Any]
    headers: RawHeaders  # for the engine
    space: str  # scope of the caller's conversation ids
    seed: bytes
    identity: Explicit
    chain: Chain
    tool_bytes: int  # of tool definitions, which are part of the prompt and of no message
    final: bool
    arrived_at: float
    trace: "TurnTrace | None" = None  # of a sampled turn, where tracing is on

    @property
    def prompt_bytes(self) -> int:
        return self.chain.total_bytes + self.tool_bytes

    @property
    def exact_tokens(self) -> int | None:
        """Known without asking when the prompt is token ids."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return None


# Fields that vLLM would take from anyone: where its KV comes from, and who goes before whom.
_OF_THE_FLEET = {
    "kv_transfer_params": "leave it out of the request",
    "priority": 'leave it out; `service_tier: "flex"` asks for offline work',
}


async def read_turn(api: Api, request: Request, space: str, config: GatewayConfig, now: float) -> Turn:
    raw = await request.body.read()
    body = read_object(request.headers, raw)
    check_model(body, config)
    for field, why in _OF_THE_FLEET.items():
        if field in body:
            raise BadRequest(f"{field} belongs to the fleet; {why}", param=field)
    field = _PROMPT_FIELD[api]
    if field not in body and not (api is Api.RESPONSES and "previous_response_id" in body):
        raise BadRequest(f"{field} is missing", param=field)
    fields = text_headers(request.headers)
    user = body.get("user")
    seed = chains.seed(space, str(body["model"]), user if isinstance(user, str) else "")
    try:
        identity = explicit(fields, body)
        chain = chains.of_body(seed, body)
    except (BadIdentity, TooDeep) as wrong:
        raise BadRequest(str(wrong)) from None
    tools = body.get("tools")
    return Turn(
        api=api,
        raw=raw,
        body=body,
        headers=[pair for pair in request.headers if pair[0].lower() in _FORWARDED],
        space=space,
        seed=seed,
        identity=identity,
        chain=chain,
        tool_bytes=len(orjson.dumps(tools)) if tools else 0,
        final=is_final(fields),
        arrived_at=now,
    )


def read_object(headers: Headers, raw: bytes) -> dict[str, Any]:
    kind = (headers.text(b"content-type") or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise BadRequest(
            f"the body must be application/json, not {kind or 'of no type'}", param="content-type"
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as wrong:
        raise BadRequest(f"the body is not JSON: {wrong.msg} at byte {wrong.pos}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def check_model(body: Mapping[str, Any], config: GatewayConfig) -> None:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise BadRequest("model must be the name of a model (GET /v1/models lists them)", param="model")
    if config.model(name) is None:
        raise ModelNotFound(
            f"the model {name[:100]!r} does not exist; GET /v1/models lists those that do", param="model"
        )


def text_headers(headers: Headers) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in headers:
        fields.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return fields
