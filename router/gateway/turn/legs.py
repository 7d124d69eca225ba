"""Legs of a transferred turn: the prefill and the decode request, and the meaning of their failures."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from placement.engines import EngineInfo
from router import metrics
from router.errors import EngineLost, EngineUnreachable, UpstreamError
from router.gateway.turn.turn import Turn
from router.http import (
    Endpoint,
    RelayEnd,
    RelayOutcome,
    Responder,
    StreamObserver,
    StreamProgress,
    UpstreamPool,
    UpstreamRequest,
    fetch,
    relay,
    usage_from,
)
from router.requests.body_parser import Api
from router.requests.fields import with_fields

log = logging.getLogger("conserve.router.legs")

_MAY_BE_DYING = frozenset({500, 503})
_DEAD_ENGINE = (b"EngineCore", b"EngineDead")  # in the errors of a vLLM whose core has died

_LIMIT = {
    Api.CHAT: ("max_tokens", "max_completion_tokens"),
    Api.COMPLETIONS: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.MESSAGES: ("max_tokens",),
}
# Neutral values for fields of the prefill leg that shape or describe an answer: its one token is discarded.
# `response_format` and `tool_choice` stay, because some templates write them into the prompt.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("stream_options", "logprobs", "prompt_logprobs", "include", "seed")),
    **dict.fromkeys(("structured_outputs", "bad_words", "logit_bias", "allowed_token_ids")),
    **dict.fromkeys(("logprob_token_ids", "stop", "stop_token_ids", "stop_sequences")),
    **dict.fromkeys(("min_tokens", "top_logprobs"), 0),
    **dict.fromkeys(("echo", "background"), False),
}


def prefill_body(
    api: Api,
    raw: tuple[bytes, ...],
    body: Mapping[str, Any],
    transfer_id: str,
    resume: Mapping[str, Any] | None = None,
    *,
    moves: bool = False,
) -> tuple[bytes, ...]:
    """Return the body of a prefill leg, whose KV a decoder fetches under `transfer_id`.

    The body has the turn's prompt, and asks for one token without a stream. `body` has the fields of `raw`.
    `moves`: the leg's engine is the decoder from which the conversation moves away.
    """
    leg = {name: value for name, value in _NEUTRAL.items() if name in body}
    limits = _LIMIT[api]
    for limit in limits:
        if limit in body or limit == limits[0]:
            leg[limit] = 1
    leg["stream"] = False
    if api is Api.RESPONSES:
        leg["store"] = False
    elif api is not Api.MESSAGES:
        leg["n"] = 1
    elif isinstance(thinking := body.get("thinking"), Mapping) and thinking.get("type") == "enabled":
        leg["thinking"] = {"type": "adaptive"}  # the same prompt, without a budget that one token cannot hold
    params = {"do_remote_decode": True, "transfer_id": transfer_id, **({"moves": True} if moves else {})}
    leg["kv_transfer_params"] = {**params, **_resumed(resume)}
    return with_fields(raw, leg)


def _resumed(resume: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"resume": resume} if resume is not None else {}


def for_leg(leg: str, turn: Turn, engine: EngineInfo) -> Turn:
    """Return the turn, with trace headers that name its leg `leg` if the turn is traced."""
    if turn.trace is None:
        return turn
    return replace(turn, headers=turn.trace.leg(leg, turn.headers, engine.engine))


def pull_from(prefiller: EngineInfo, transfer_id: str) -> dict[str, Any]:
    """Return the parameters with which a decoder fetches the KV of `transfer_id` from `prefiller`."""
    host, _, port = prefiller.transfer.rpartition(":")
    return {
        "do_remote_prefill": True,
        "transfer_id": transfer_id,
        "remote_host": host,
        "remote_port": int(port),
        "remote_epoch": prefiller.epoch,
    }


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """Result of the prefill leg, as the prefiller reports it."""

    prompt_tokens: int  # exact; 0 when the prefill failed
    params: dict[str, Any] | None
    cached_tokens: int | None = None  # prompt tokens that were cached; None: the engine does not report them
    unreachable: bool = False
    died: bool = False  # the prefiller crashed while it had the request


async def prefill(
    pool: UpstreamPool, turn: Turn, key: str, prefiller: EngineInfo, transfer_id: str, *, moves: bool = False
) -> PrefillAnswer:
    """Run the prefill leg. If it fails, `prompt_tokens` is 0, and the decoder computes the prompt.

    `key`: the conversation's key. `moves`: the conversation moves away from `prefiller`, its decoder.
    """
    body = prefill_body(turn.api, turn.raw, turn.body, transfer_id, turn.resume, moves=moves)
    request = _request(turn, key, body, repeatable=False)
    try:
        response = await fetch(pool, Endpoint.parse(prefiller.http), request)
        answer = orjson.loads(response.body) if response.status == 200 else {}
    except (UpstreamError, orjson.JSONDecodeError) as error:
        died = isinstance(error, EngineLost)
        unreachable = died or isinstance(error, EngineUnreachable)
        return _failed(key, prefiller, str(error), unreachable=unreachable, died=died)
    if response.status != 200:
        return _failed(key, prefiller, f"status {response.status}")
    usage = usage_from(answer.get("usage") or {})
    if usage is None:
        return PrefillAnswer(0, answer.get("kv_transfer_params"))
    cached = usage.cached_tokens or 0
    metrics.PREFILL_TOKENS.labels("cached").inc(cached)
    metrics.PREFILL_TOKENS.labels("computed").inc(max(0, usage.prompt_tokens - cached))
    return PrefillAnswer(usage.prompt_tokens, answer.get("kv_transfer_params"), usage.cached_tokens)


async def decode(
    pool: UpstreamPool,
    turn: Turn,
    key: str,
    decoder: EngineInfo,
    params: Mapping[str, Any] | None,
    responder: Responder,
    observer: StreamObserver,
    progress: StreamProgress | None,
) -> RelayOutcome:
    """Run the decode leg, and relay its answer to the client.

    The engine gets the client's body with `params` and the hints for engines. `progress` records a stream
    that can be resumed; it is None for any other answer.
    """
    given = {**(params or {}), **_resumed(turn.resume)}
    if hints := turn.prompt.hints.for_engine:
        given["conversation"] = hints
    body = with_fields(turn.raw, {"kv_transfer_params": given}) if given else turn.raw
    stream_headers = progress.headers if progress is not None else []
    request = _request(turn, key, body, *stream_headers, repeatable=not params)
    endpoint = Endpoint.parse(decoder.http)
    return await relay(pool, endpoint, request, responder, observer, hold=_MAY_BE_DYING, progress=progress)


def _request(
    turn: Turn, key: str, body: tuple[bytes, ...], *more: tuple[bytes, bytes], repeatable: bool
) -> UpstreamRequest:
    headers = [
        *turn.headers,
        (b"x-session-id", key.encode()),
        (b"x-conserve-owner", turn.space.encode()),
        *more,
    ]
    return UpstreamRequest("POST", turn.api.target, headers, body, repeatable)


def _failed(
    key: str, prefiller: EngineInfo, why: str, *, unreachable: bool = False, died: bool = False
) -> PrefillAnswer:
    metrics.FALLBACKS.labels("prefill_failed").inc()
    log.warning(
        "prefill failed, the decoder computes the prompt conversation=%s engine=%s reason=%r",
        *(key, prefiller.engine, why),
    )
    return PrefillAnswer(0, None, unreachable=unreachable, died=died)


def decoder_lost(outcome: RelayOutcome) -> bool:
    """Return whether the decoder was lost before it began an answer."""
    if outcome.end is RelayEnd.NOT_STARTED:
        return isinstance(outcome.error, EngineLost | EngineUnreachable)
    held = outcome.response if outcome.end is RelayEnd.HELD else None
    return held is not None and (held.status == 503 or any(mark in held.body for mark in _DEAD_ENGINE))


def crashed_under_request(outcome: RelayOutcome) -> bool:
    """Return whether the engine crashed while it ran the request.

    An engine that was unreachable, or that refused the request, did not run it.
    """
    if outcome.response is not None:
        return any(mark in outcome.response.body for mark in _DEAD_ENGINE)
    return isinstance(outcome.error, EngineLost)


def send_held_answer(outcome: RelayOutcome, responder: Responder) -> None:
    """Send the client an answer that was held back; if the engine gave none, raise its error."""
    if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
        raise outcome.error
    if outcome.end is RelayEnd.HELD and outcome.response is not None:
        kind = outcome.response.headers.get(b"content-type") or b"application/json"
        responder.respond(outcome.response.status, outcome.response.body, [(b"content-type", kind)])
