"""Fields of a request's body: which ones may go to an engine, and their limits.

Engines accept more fields than clients need, such as the source of a request's KV, its priority and its id.
The fleet sets those, and a request with one of them is refused. Unknown fields are dropped, so that a
client's newest parameter neither fails the request nor reaches an engine. Numbers are bounded before anything
computes with them: the engine, the offline queue or its store must not be the first to find out that 10^30
tokens or an infinite SLO target make no sense.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
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
from router.requests.server_tools import supported_tools

MAX_TOKENS = 10_000_000  # of an answer: beyond any model's context
MAX_CHOICES = 128
OFFLINE_PRIORITY = 10  # the engines' scheduler treats requests above 0 as offline
# Engines ignore the field `priority` in the body of Anthropic's messages, but not this header.
OFFLINE_HEADER = (b"x-vllm-priority", str(OFFLINE_PRIORITY).encode())
MAX_GRAMMAR_BYTES = 64 * 1024  # of JSON, for each: the time and memory to compile it grow with it
MAX_OTHER_BYTES = 64 * 1024  # of JSON, for all fields that are neither prompt nor grammar
MAX_STEP_TOKEN_IDS = 262_144  # token ids that a field may list: those of a whole vocabulary
_MAX_SLO_MS = 24 * 3600 * 1000.0
_INT64 = 2**63 - 1
_INT32 = 2**31 - 1


@checks(BodyPart.GRAMMAR, type="object")
def _grammar(name: str, value: Any) -> None:
    """Check a schema, grammar, expression or list of choices that an answer has to follow.

    vLLM fails if `structured_outputs` is not an object.
    """
    if type(value) is not dict:
        raise wrong(name, "an object", None)
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
    """Accept SLO targets, and refuse all other `vllm_xargs`, which are meant for vLLM's plugins."""
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
        raise BadRequest("no answer is generated in the background: leave background out", param=name)


@checks(type="boolean", const=False)
def _no_beam_search(name: str, value: Any) -> None:
    """Refuse beam search: its steps are requests of their own in vLLM, without class, priority and limits."""
    flag(name, value)
    if value:
        raise BadRequest(f"{name} is not served: leave it out, and ask for n sampled answers", param=name)


@checks()
def _any_value(name: str, value: Any) -> None:
    """Accept any value: the engine checks it, and answers 400."""


@checks(BodyPart.PROMPT)
def _prompt(name: str, value: Any) -> None:
    """Accept any value of bounded size: the engine checks the rest, and answers 400."""


# Checks by name of the field. A field that vLLM checks itself has none.
_CHECKS: Mapping[str, Check] = {
    "temperature": number(0.0, 100.0),
    **dict.fromkeys(("top_p", "min_p"), number(0.0, 1.0)),
    "top_k": integer(-1, _INT32),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), number(-2.0, 2.0)),
    "repetition_penalty": number(0.01, 100.0),
    "length_penalty": number(-100.0, 100.0),
    "seed": integer(-_INT64 - 1, _INT64),
    "n": integer(1, MAX_CHOICES),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), integer(1, MAX_TOKENS)),
    "min_tokens": integer(0, MAX_TOKENS),
    **dict.fromkeys(("thinking_token_budget", "truncate_prompt_tokens"), integer(-1, MAX_TOKENS)),
    "max_tool_calls": integer(0, _INT32),
    "dimensions": integer(1, 65_536),
    "stop": one_or_more(text(4096), 16),
    "stop_sequences": items(16, text(4096)),
    **dict.fromkeys(("stop_token_ids", "logprob_token_ids"), items(1024, integer(0, _INT32))),
    "allowed_token_ids": items(MAX_STEP_TOKEN_IDS, integer(0, _INT32)),
    "bad_words": items(128, text(1024)),
    "logit_bias": _biases,
    **dict.fromkeys(("top_logprobs", "prompt_logprobs"), integer(-1, MAX_STEP_TOKEN_IDS)),
    **dict.fromkeys(("structured_outputs", "response_format", "text", "output_config"), _grammar),
    "vllm_xargs": _extra_arguments,
    "cache_salt": text(128),
    "use_beam_search": _no_beam_search,
    "background": _not_in_background,
    "chat_template_kwargs": _template_arguments,
    **dict.fromkeys(
        (
            *("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "stream", "echo"),
            *("include_stop_str_in_output", "add_special_tokens", "return_token_ids", "logprobs"),
            *("return_tokens_as_token_ids", "include_reasoning", "enable_response_messages"),
            *("add_generation_prompt", "continue_final_message", "use_activation", "return_prompt_text"),
        ),
        flag,
    ),
    **dict.fromkeys(("reasoning", "thinking"), nested),
    **dict.fromkeys(("messages", "prompt", "input", "instructions", "system", "suffix", "tokens"), _prompt),
    **dict.fromkeys(("tools", "documents", "functions", "prediction"), _prompt),
}
# Checks of fields that mean something else at one endpoint.
_OTHER_CHECKS: Mapping[str, Mapping[str, Check]] = {
    "/v1/completions": {
        "max_tokens": integer(0, MAX_TOKENS),
        "logprobs": integer(-1, MAX_STEP_TOKEN_IDS),
    },
    "/v1/responses": {"prompt": nested},
}

# Known fields by endpoint: those of vLLM that clients may set, and those that the gateway reads itself.
_TURN = """model stream temperature top_p top_k cache_salt vllm_xargs user metadata service_tier session_id
    conversation conversation_id prompt_cache_key kv_hints nvext slo_class"""
_OPENAI = """min_p frequency_penalty presence_penalty repetition_penalty seed stop stop_token_ids logit_bias
    ignore_eos include_stop_str_in_output skip_special_tokens structured_outputs"""
_SAMPLED = """n max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    length_penalty use_beam_search truncate_prompt_tokens truncation_side thinking_token_budget
    response_format stream_options echo add_special_tokens spaces_between_special_tokens return_token_ids
    return_tokens_as_token_ids"""
_TOOLS = "tools tool_choice parallel_tool_calls chat_template_kwargs include_reasoning top_logprobs"
_TEMPLATE = "add_generation_prompt continue_final_message add_special_tokens chat_template_kwargs"
_KNOWN: Mapping[str, str] = {
    "/v1/chat/completions": f"""{_TURN} {_OPENAI} {_SAMPLED} {_TOOLS} {_TEMPLATE} messages documents
        max_completion_tokens reasoning_effort return_prompt_text""",
    "/v1/completions": f"{_TURN} {_OPENAI} {_SAMPLED} prompt suffix",
    "/v1/responses": f"""{_TURN} {_OPENAI} {_TOOLS} input instructions include max_output_tokens
        max_tool_calls previous_response_id store text reasoning prompt truncation background
        enable_response_messages""",
    "/v1/messages": f"""{_TURN} messages system max_tokens stop_sequences thinking tools tool_choice
        output_config chat_template_kwargs""",
    "/v1/embeddings": f"""{_TEMPLATE} model user input messages cache_salt dimensions encoding_format
        embed_dtype endianness padding truncate_prompt_tokens truncation_side use_activation""",
    "/tokenize": f"{_TEMPLATE} model prompt messages tools return_token_strs",
    "/detokenize": "model tokens",
}
FIELDS: Mapping[str, Mapping[str, Check]] = {
    path: {
        name: _OTHER_CHECKS.get(path, {}).get(name) or _CHECKS.get(name, _any_value) for name in names.split()
    }
    for path, names in _KNOWN.items()
}
_SAME_FIELDS = {"/v1/messages/count_tokens": "/v1/messages"}

# Fields of vLLM that only the fleet may set, because they steer an engine or make it read foreign data.
REFUSED: Mapping[str, str] = {
    "kv_transfer_params": "leave it out of the request",
    "ec_transfer_params": "leave it out of the request",
    "priority": 'leave it out; `service_tier: "flex"` asks for offline work',
    "request_id": "leave it out; the header X-Request-Id names a request",
    "chat_template": "a model's template comes with the model",
    "prompt_embeds": "send the prompt as text or token ids",
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), "leave it out of the request"),
}


class UnknownFields(StrEnum):
    """Treatment of request fields that neither vLLM nor the gateway knows."""

    DROP = "drop"
    REFUSE = "refuse"


def with_fields(raw: tuple[bytes, ...], fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Append fields to a JSON object that is held in pieces, without copying the object.

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
    """Append a list as field `name` to a JSON object in pieces. `items` are pieces of its content."""
    *before, last = with_fields(raw, {name: []})
    return (*before, last[:-2], *items, b"]}")


def fields_of(path: str) -> Mapping[str, Check]:
    """Return the fields that a request to this endpoint may have, by name."""
    return FIELDS[_SAME_FIELDS.get(path, path)]


def known_part(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body for the endpoint `path` without its unknown fields and tools."""
    known = fields_of(path)
    kept = {name: value for name, value in body.items() if name in known}
    for name, value in supported_tools(path, body)[0].items():
        if value is None:
            del kept[name]
        else:
            kept[name] = value
    return kept


def check_fields(
    path: str, body: Mapping[str, Any], unknown: UnknownFields = UnknownFields.DROP
) -> tuple[str, ...]:
    """Check a body for the endpoint `path`, and return the names of its unknown fields and tools.

    Raises BadRequest for fields and values that no engine may get.
    """
    known, ignored = fields_of(path), []
    others: dict[str, Any] = {}  # values that are neither prompt nor grammar
    for name, value in body.items():
        if name in REFUSED:
            raise BadRequest(f"{name} belongs to the fleet; {REFUSED[name]}", param=name)
        if (check := known.get(name)) is None:
            ignored.append(name)
            check = _CHECKS.get(name, _any_value)
        elif value is not None:
            check.apply(name, value)
        if check.part is BodyPart.OTHER:
            others[name] = value
    ignored += supported_tools(path, body)[1]
    if ignored and unknown is UnknownFields.REFUSE:
        shown = ignored[0][:100]
        text = f"{shown!r} is no parameter of {path}; leave it out"
        raise BadRequest(text, param=shown, code="unknown_parameter")
    if (size := len(orjson.dumps(others))) > MAX_OTHER_BYTES:
        largest = max(others, key=lambda name: len(orjson.dumps(others[name])))
        text = f"the fields beside the prompt have {size} bytes as JSON, most of them in {largest[:100]}"
        raise BadRequest(f"{text}; they may have {MAX_OTHER_BYTES} together", param=largest[:100])
    return tuple(ignored)
