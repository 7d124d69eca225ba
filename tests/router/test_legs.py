"""Both legs of a transferred turn have the client's prompt and one transfer id."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.engines import Role
from router.gateway.turn.legs import prefill_body, pull_from
from router.requests.body_parser import Api
from router.requests.fields import with_fields
from tests.support.engines import info

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=12) | st.just("kv_transfer_params"), VALUES)


@given(BODIES, st.sampled_from([b"", b"  ", b"\n\t"]), st.booleans(), st.integers(0, 200))
def test_the_decode_leg_appends_one_field_to_the_clients_bytes(
    body: dict[str, Any], space: bytes, pretty: bool, cut: int
) -> None:
    body = {"model": "m", **body}
    raw = space + orjson.dumps(body, option=orjson.OPT_INDENT_2 if pretty else None)
    sent = raw + space
    leg = b"".join(with_fields((sent[:cut], sent[cut:]), {"kv_transfer_params": {"transfer_id": "t"}}))
    for parser in (orjson.loads, json.loads):  # the router uses orjson, engines use json
        assert parser(leg) == {**body, "kv_transfer_params": {"transfer_id": "t"}}
    assert leg.startswith(raw.rstrip()[:-1])


@pytest.mark.parametrize("api", list(Api))
def test_the_prefill_leg_has_the_same_prompt_and_asks_for_one_token(api: Api) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "prompt": "x",
        "input": "x",
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 4,
        "min_tokens": 9,
        "logprobs": True,
        "max_tokens": 500,
        "max_completion_tokens": 500,
        "max_output_tokens": 500,
        "store": True,
    }
    leg = orjson.loads(b"".join(prefill_body(api, (orjson.dumps(body),), body, "t")))
    for same in ("model", "messages", "prompt", "input", "tools", "tool_choice"):
        assert leg[same] == body[same]
    assert leg["stream"] is False
    assert not any(leg[none] for none in ("stream_options", "min_tokens", "logprobs"))
    limits = {
        Api.CHAT: {"max_tokens": 1, "max_completion_tokens": 1, "n": 1},
        Api.COMPLETIONS: {"max_tokens": 1, "n": 1},
        Api.RESPONSES: {"max_output_tokens": 1, "store": False},
        Api.MESSAGES: {"max_tokens": 1},
    }[api]
    assert {name: leg[name] for name in limits} == limits
    assert leg["kv_transfer_params"] == {"do_remote_decode": True, "transfer_id": "t"}


ANSWER_ONLY = {
    "structured_outputs": {"regex": "(a{1,999}b){1,999}"},
    "bad_words": ["w"] * 1000,
    "logit_bias": {"1": 1.0},
    "allowed_token_ids": [1],
    "logprob_token_ids": [1],
    "stop": ["x"] * 16,
    "stop_token_ids": [2],
    "stop_sequences": ["x"],
}


def test_the_prefill_leg_omits_fields_that_only_shape_the_answer() -> None:
    body = {"model": "m", "messages": [], **ANSWER_ONLY}
    leg = orjson.loads(b"".join(prefill_body(Api.CHAT, (orjson.dumps(body),), body, "t")))
    assert {name: leg[name] for name in ANSWER_ONLY} == dict.fromkeys(ANSWER_ONLY)


def test_the_prefill_leg_keeps_fields_that_templates_render() -> None:
    formed = {"response_format": {"type": "json_object"}, "tool_choice": "required", "tools": [{}]}
    body = {"model": "m", "messages": [], **formed}
    leg = orjson.loads(b"".join(prefill_body(Api.CHAT, (orjson.dumps(body),), body, "t")))
    assert {name: leg[name] for name in formed} == formed


def test_the_decode_leg_names_the_address_from_which_to_fetch_the_kv() -> None:
    prefiller = info("p0", Role.PREFILL, epoch=7)
    params = pull_from(type(prefiller)(**{**_fields(prefiller), "transfer": "10.0.0.1:4001"}), "t")
    assert (params["remote_host"], params["remote_port"], params["remote_epoch"]) == ("10.0.0.1", 4001, 7)


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in type(one).__slots__}
