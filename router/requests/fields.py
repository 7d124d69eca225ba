"""Fields of a request's body: which ones may go to an engine, and their bounds.

Engines accept more fields than clients need, such as the source of a request's KV, its priority and its id.
The fleet sets those. A field that is not in the tables below is refused, and numbers are bounded before
anything computes with them: the engine, the offline queue or its store must not be the first to find out that
10^30 tokens or an infinite SLO target make no sense.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from router.errors import BadRequest
from router.requests.field_checks import (
    BodyPart,
    Check,
    checks,
    flag,
    integer,
    items,
    nested,
    number,
    one_or_more,
    positive,
    text,
    wrong,
)

MAX_TOKENS = 10_000_000  # of an answer: beyond any model's context
MAX_CHOICES = 128
OFFLINE_PRIORITY = 10  # the engines' scheduler treats requests above 0 as offline
# Engines ignore the field `priority` in the body of Anthropic's messages, but not this header.
OFFLINE_HEADER = (b"x-vllm-priority", str(OFFLINE_PRIORITY).encode())
MAX_GRAMMAR_BYTES = 64 * 1024  # of JSON, for each: the time and memory to compile it grow with it
MAX_OTHER_BYTES = 64 * 1024  # of JSON, for all fields that are neither prompt nor grammar
MAX_STEP_TOKEN_IDS = 262_144  # of a vocabulary
_MAX_SLO_MS = 24 * 3600 * 1000.0
_INT64 = 2**63 - 1
_INT32 = 2**31 - 1


@checks(BodyPart.GRAMMAR)
def _grammar(name: str, value: Any) -> None:
    """Check a schema, grammar, expression or list of choices that an answer has to follow."""
    nested(name, value)
    if (size := len(orjson.dumps(value))) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{name} has {size} bytes as JSON; it may have {MAX_GRAMMAR_BYTES}", param=name)


@checks(type="object", maxProperties=1024, additionalProperties={"type": "number"})
def _biases(name: str, value: Any) -> None:
    if type(value) is not dict or len(value) > 1024:
        raise wrong(name, "an object of at most 1024 token ids with their biases", None)
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and int(token) <= _INT32 if len(token) < 11 else False):
            raise BadRequest(f"{name} has a key that is no token id", param=name)
        number(-100.0, 100.0)(name, bias)


_TEMPLATE_INPUT = ("chat_template", "tokenize", "tools", "documents", "messages", "conversation")
_SLO = positive(_MAX_SLO_MS)
_EXTRA = frozenset({"slo_ttft_ms", "slo_tbt_ms"})


@checks(type="object", properties=dict.fromkeys(sorted(_EXTRA), _SLO.schema), additionalProperties=False)
def _extra_arguments(name: str, value: Any) -> None:
    """Allow SLO targets, and no other arguments for vLLM's plugins."""
    if type(value) is not dict:
        raise wrong(name, f"an object of {' and '.join(sorted(_EXTRA))}", None)
    for key, target in value.items():
        if key not in _EXTRA:
            raise BadRequest(f"{name} takes {' and '.join(sorted(_EXTRA))} and nothing else", param=name)
        _SLO(f"{name}.{key}", target)


@checks(BodyPart.PROMPT, type="object")
def _template_arguments(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise wrong(name, "an object", None)
    if not value.keys().isdisjoint(_TEMPLATE_INPUT):
        raise BadRequest(f"{name} may not replace the template or its input", param=name)
    nested(name, value)


@checks(type="boolean")
def _not_in_background(name: str, value: Any) -> None:
    flag(name, value)
    if value:
        raise BadRequest("answers are not kept to be fetched later: leave background out", param=name)


@checks(type="boolean", const=False)
def _no_beam_search(name: str, value: Any) -> None:
    """Refuse beam search: vLLM makes a request of each step, which no class, priority or limit reaches."""
    flag(name, value)
    if value:
        raise BadRequest(f"{name} is not served: leave it out, and ask for n sampled answers", param=name)


@checks()
def _any_value(name: str, value: Any) -> None:
    """Accept any value: the engine checks it, and answers 400."""


@checks(BodyPart.PROMPT)
def _prompt(name: str, value: Any) -> None:
    """Accept any value of bounded size: the engine checks the rest, and answers 400."""


_TOKENS = integer(1, MAX_TOKENS)
_TOKEN_ID = integer(0, _INT32)
_SAMPLING: dict[str, Check] = {
    "temperature": number(0.0, 100.0),
    "top_p": number(0.0, 1.0),
    "min_p": number(0.0, 1.0),
    "top_k": integer(-1, _INT32),
    "frequency_penalty": number(-2.0, 2.0),
    "presence_penalty": number(-2.0, 2.0),
    "repetition_penalty": number(0.01, 100.0),
    "length_penalty": number(-100.0, 100.0),
    "seed": integer(-_INT64 - 1, _INT64),
    "stop": one_or_more(text(4096), 16),
    "stop_token_ids": items(1024, _TOKEN_ID),
    "allowed_token_ids": items(MAX_STEP_TOKEN_IDS, _TOKEN_ID),
    "logprob_token_ids": items(1024, _TOKEN_ID),
    "bad_words": items(1024, text(1024)),
    "logit_bias": _biases,
    "top_logprobs": integer(-1, MAX_STEP_TOKEN_IDS),
    "prompt_logprobs": integer(-1, MAX_STEP_TOKEN_IDS),
    "min_tokens": integer(0, MAX_TOKENS),
    "thinking_token_budget": integer(-1, MAX_TOKENS),
    "truncate_prompt_tokens": integer(-1, MAX_TOKENS),
    "structured_outputs": _grammar,
    "vllm_xargs": _extra_arguments,
    "cache_salt": text(128),
    "use_beam_search": _no_beam_search,
    **dict.fromkeys(
        (
            *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens"),
            *("include_stop_str_in_output", "add_special_tokens", "stream", "return_token_ids"),
            *("return_tokens_as_token_ids",),
        ),
        flag,
    ),
}
# Fields of OpenAI's and Anthropic's libraries that do not change how much an engine computes.
_ANY: dict[str, Check] = dict.fromkeys(
    (
        *("model", "user", "metadata", "service_tier", "store", "stream_options", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "session_id", "conversation"),
        *("conversation_id", "truncation_side", "moderation", "kv_hints", "nvext", "slo_class"),
    ),
    _any_value,
)
_TOOLS: dict[str, Check] = {
    "tools": _prompt,
    **dict.fromkeys(("tool_choice", "parallel_tool_calls"), _any_value),
}
_CHOICES: dict[str, Check] = {"n": integer(1, MAX_CHOICES), "best_of": integer(1, MAX_CHOICES)}
_TEMPLATE: dict[str, Check] = {
    "chat_template_kwargs": _template_arguments,
    "documents": _prompt,
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "echo"), flag),
}

FIELDS: Mapping[str, Mapping[str, Check]] = {
    "/v1/chat/completions": {
        **_ANY,
        **_SAMPLING,
        **_TOOLS,
        **_CHOICES,
        **_TEMPLATE,
        "messages": _prompt,
        "max_tokens": _TOKENS,
        "max_completion_tokens": _TOKENS,
        "logprobs": flag,
        "include_reasoning": flag,
        "response_format": _grammar,
        **dict.fromkeys(("functions", "prediction"), _prompt),
        **dict.fromkeys(
            (
                *("audio", "function_call", "modalities", "reasoning_effort", "verbosity"),
                "web_search_options",
            ),
            _any_value,
        ),
    },
    "/v1/completions": {
        **_ANY,
        **_SAMPLING,
        **_CHOICES,
        "prompt": _prompt,
        "suffix": _prompt,
        "echo": flag,
        "response_format": _grammar,
        "max_tokens": integer(0, MAX_TOKENS),
        "logprobs": integer(-1, MAX_STEP_TOKEN_IDS),
    },
    "/v1/responses": {
        **_ANY,
        **_SAMPLING,
        **_TOOLS,
        "input": _prompt,
        "instructions": _prompt,
        "max_output_tokens": _TOKENS,
        "max_tool_calls": integer(0, _INT32),
        "background": _not_in_background,
        "chat_template_kwargs": _template_arguments,
        "include_reasoning": flag,
        "enable_response_messages": flag,
        "text": _grammar,
        "reasoning": nested,
        "prompt": nested,
        "context_management": nested,
        **dict.fromkeys(("include", "previous_response_id", "truncation"), _any_value),
    },
    "/v1/messages": {
        "max_tokens": _TOKENS,
        "messages": _prompt,
        "system": _prompt,
        "temperature": number(0.0, 100.0),
        "top_p": number(0.0, 1.0),
        "top_k": integer(-1, _INT32),
        "stop_sequences": items(16, text(4096)),
        "stream": flag,
        "vllm_xargs": _extra_arguments,
        "chat_template_kwargs": _template_arguments,
        "cache_salt": text(128),
        "thinking": nested,
        "tools": _prompt,
        "output_config": _grammar,
        **dict.fromkeys(
            (
                *("model", "metadata", "service_tier", "tool_choice", "cache_control", "container"),
                *("diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id", "betas"),
                *("billing_policy", "compaction", "context_management", "fallback_credit_token", "fallbacks"),
                *("mcp_servers", "thread", "session_id", "conversation", "prompt_cache_key"),
                *("conversation_id", "kv_hints", "nvext", "slo_class"),
            ),
            _any_value,
        ),
    },
    "/v1/embeddings": {
        "input": _prompt,
        "messages": _prompt,
        "cache_salt": text(128),
        "dimensions": integer(1, 65_536),
        "truncate_prompt_tokens": integer(-1, MAX_TOKENS),
        "chat_template_kwargs": _template_arguments,
        "add_special_tokens": flag,
        "add_generation_prompt": flag,
        "continue_final_message": flag,
        "use_activation": flag,
        **dict.fromkeys(
            (
                *("model", "user", "encoding_format", "embed_dtype", "endianness", "truncation_side"),
                "padding",
            ),
            _any_value,
        ),
    },
    "/tokenize": {
        "chat_template_kwargs": _template_arguments,
        **dict.fromkeys(("prompt", "messages", "tools"), _prompt),
        **dict.fromkeys(
            (
                *("model", "add_generation_prompt", "return_token_strs", "continue_final_message"),
                "add_special_tokens",
            ),
            _any_value,
        ),
    },
    "/detokenize": {"model": _any_value, "tokens": _prompt},
}
_SAME_FIELDS = {"/v1/messages/count_tokens": "/v1/messages"}

# Fields that vLLM accepts from anybody, and only the fleet may set.
_FLEET_FIELDS = {
    "kv_transfer_params": "leave it out of the request",
    "ec_transfer_params": "leave it out of the request",
    "priority": 'leave it out; `service_tier: "flex"` asks for offline work',
    "request_id": "leave it out; the header X-Request-Id names a request",
    "chat_template": "a model's template comes with the model",
}


def with_fields(raw: tuple[bytes, ...], fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Append fields to a JSON object that is held in pieces, without writing the object again.

    All parsers of engines take the last of two fields with one name, so that an appended field replaces the
    client's. The object must not be empty; a checked body has a model at least.
    """
    if not fields:
        return raw
    before = list(raw)
    while (end := before[-1].rfind(b"}")) < 0:
        before.pop()
    last = before.pop()
    return (*before, last[:end], b"," + orjson.dumps(fields)[1:])


def with_items(raw: tuple[bytes, ...], name: str, items: Iterable[bytes]) -> tuple[bytes, ...]:
    """Append a list to a JSON object in pieces. `items` are pieces of its items, with commas between."""
    *before, last = with_fields(raw, {name: []})
    return (*before, last[:-2], *items, b"]}")


def fields_of(path: str) -> Mapping[str, Check]:
    """Return the fields that a request to this endpoint may have, by name."""
    return FIELDS[_SAME_FIELDS.get(path, path)]


def check_fields(path: str, body: Mapping[str, Any]) -> None:
    """Refuse a body with fields or values that no engine may get. `path`: of its endpoint."""
    known = fields_of(path)
    for name, value in body.items():
        check = known.get(name)
        if check is None:
            raise _refused(name, path)
        if value is not None:
            check.apply(name, value)
    others = {name: value for name, value in body.items() if known[name].part is BodyPart.OTHER}
    if (size := len(orjson.dumps(others))) > MAX_OTHER_BYTES:
        largest = max(others, key=lambda name: len(orjson.dumps(others[name])))
        text = f"the fields beside the prompt have {size} bytes as JSON, most of them in {largest}"
        raise BadRequest(f"{text}; they may have {MAX_OTHER_BYTES} together", param=largest)


def _refused(name: str, path: str) -> BadRequest:
    why = _FLEET_FIELDS.get(name)
    if why is not None:
        return BadRequest(f"{name} belongs to the fleet; {why}", param=name)
    shown = name[:100]
    return BadRequest(
        f"{shown!r} is no parameter of {path}; leave it out", param=shown, code="unknown_parameter"
    )
