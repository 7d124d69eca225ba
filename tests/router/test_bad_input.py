"""Invalid requests get an error in OpenAI's format within a time limit, and leave nothing behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai.types as openai_types
import orjson
import pytest
from anthropic.types import beta as anthropic_beta
from openai.types import chat, responses

from router.auth.keys import inline_keys
from router.gateway.config import GatewayLimits, ServedModel
from router.requests.fields import FIELDS, check_fields
from tests.support.fake_fleet import MODEL, FakeFleet, ask, fleet, get, user
from tests.support.waiting import until

LIMITS = GatewayLimits(body_mib=1, request_timeout_s=0.3, idle_timeout_s=0.5)


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    """Yield a fleet, and check after the test that it has no open connections or unused reservations left."""
    models = (ServedModel(MODEL, aliases=("alias",)),)
    async with fleet(tmp_path, limits=LIMITS, models=models, keys=inline_keys(("right",), ("boss",))) as one:
        yield one
        gateway = one.gateways[0]

        def nothing_is_left() -> bool:
            reserved = sum(one.directory.table.kv_in_use(name) for name in ("d0", "d1"))
            held = sum(engine.held.total() for engine in one.engines.values())
            running = [c for c in one.directory.table.conversations if c.running]
            busy = sum(engine.running for engine in one.engines.values())
            return not gateway.server.stats.connections and reserved == held and not running and not busy

        await until(nothing_is_left)


KEY = {"authorization": "Bearer right", "content-type": "application/json"}


async def post(
    made: FakeFleet,
    data: bytes,
    headers: dict[str, str] | None = None,
    path: str = "/v1/chat/completions",
) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{made.urls[0]}{path}", data=BytesIO(data), headers=headers or KEY) as response,
    ):
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad_request"),
        (b"[]", 400, "bad_request"),
        (b"\xff", 400, "bad_request"),
        (b'{"messages": []}', 400, "bad_request"),
        (b'{"model": 7, "messages": []}', 400, "bad_request"),
        (b'{"model": "small"}', 400, "bad_request"),
        (b'{"model": "other", "messages": []}', 404, "model_not_found"),
        (
            b'{"model": "small", "messages": [], "kv_transfer_params": {"remote_host": "x"}}',
            400,
            "bad_request",
        ),
        (b'{"model": "small", "messages": [' + b"[" * 500 + b"]" * 500 + b"]}", 400, "bad_request"),
        (b'{"model": "small", "messages": [], "priority": -5}', 400, "bad_request"),
        (b'{"model": "small", "messages": [], "session_id": {}}', 400, "bad_request"),
        (b'{"model": "small", "messages": [], "request_id": "another\'s"}', 400, "bad_request"),
        (b'{"model": "small", "messages": [], "chat_template": "{{ 1 }}"}', 400, "bad_request"),
        (
            b'{"model": "small", "messages": [], "tools": ' + b"[" * 500 + b"]" * 500 + b"}",
            400,
            "bad_request",
        ),
    ],
)
async def test_invalid_bodies_are_refused_without_asking_an_engine(
    made: FakeFleet, body: bytes, status: int, code: str
) -> None:
    got, error = await post(made, body)
    assert (got, error["code"]) == (status, code)
    assert error["type"] == "invalid_request_error"
    assert not made.decoder_requests()


async def test_a_body_of_another_content_type_than_json_is_refused(made: FakeFleet) -> None:
    status, error = await post(made, b"{}", {**KEY, "content-type": "text/plain"})
    assert (status, error["param"]) == (400, "content-type")


async def test_a_key_is_required_if_the_configuration_lists_keys(made: FakeFleet) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        answer = await ask(made.urls[0], [user("x")], headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.error["type"] == "authentication_error"
    assert (await get(f"{made.urls[0]}/health"))[0] == 200
    assert (await ask(made.urls[0], [user("x")], headers={"x-api-key": "right"})).status == 200


async def test_a_caller_cannot_see_conversations_of_another_key(made: FakeFleet) -> None:
    named = {**KEY, "x-conversation-id": "mine"}
    assert (await ask(made.urls[0], [user("x")], headers=named)).status == 200
    url = f"{made.urls[0]}/v1/conversations"
    boss = {"authorization": "Bearer boss"}
    assert (await get(f"{url}/mine", headers=named))[0] == 200
    assert (await get(f"{url}/mine", headers=boss))[0] == 404
    assert (await get(f"{url}/mine", "DELETE", headers=boss))[0] == 404
    _, listed = await get(url, headers=named)
    assert [one["id"] for one in listed["data"]] == ["mine"]
    _, listed = await get(url, headers=boss)
    assert [one["id"].endswith(":mine") for one in listed["data"]] == [True]


async def test_conversations_are_listed_in_pages(made: FakeFleet) -> None:
    for number in range(5):
        await ask(made.urls[0], [user("x")], headers={**KEY, "x-conversation-id": f"c{number}"})
    await made.settle()  # the end of a turn counts as a use
    seen, after = [], ""
    while True:
        _, page = await get(f"{made.urls[0]}/v1/conversations?limit=2{after}", headers=KEY)
        seen += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == [f"c{number}" for number in range(5)]
    assert (await get(f"{made.urls[0]}/v1/conversations?limit=x", headers=KEY))[0] == 400


ENDLESS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -5}, "integer_below_min_value"),
    ({"max_tokens": 0}, "integer_below_min_value"),
    ({"max_tokens": 10**30}, "integer_above_max_value"),
    ({"max_tokens": 1.5}, "invalid_value"),
    ({"max_tokens": True}, "invalid_type"),
    ({"max_tokens": "8"}, "invalid_type"),
    ({"n": 0}, "integer_below_min_value"),
    ({"n": 10**6}, "integer_above_max_value"),
    ({"temperature": -1}, "invalid_value"),
    ({"temperature": 1e300}, "invalid_value"),
    ({"repetition_penalty": 1e-300}, "invalid_value"),
    ({"seed": 10**30}, "integer_above_max_value"),
    ({"logit_bias": {"7": 1e300}}, "invalid_value"),
    ({"logit_bias": {"x": 1}}, "bad_request"),
    ({"stop": ["x"] * 1000}, "bad_request"),
    ({"response_format": {"type": "json_schema", "x": "y" * 70_000}}, "bad_request"),
    ({"structured_outputs": {"grammar": "y" * 70_000}}, "bad_request"),
    ({"structured_outputs": {"choice": ["a"] * 20_000}}, "bad_request"),
    ({"structured_outputs": "a schema"}, "invalid_type"),
    ({"vllm_xargs": {"slo_tbt_ms": "inf"}}, "invalid_type"),
    ({"vllm_xargs": {"slo_tbt_ms": "nan"}}, "invalid_type"),
    ({"vllm_xargs": {"slo_tbt_ms": 0}}, "invalid_value"),
    ({"vllm_xargs": {"slo_ttft_ms": -1}}, "invalid_value"),
    ({"vllm_xargs": {"slo_ttft_ms": 1e300}}, "invalid_value"),
    ({"vllm_xargs": {"slo_ttft_ms": [1]}}, "invalid_type"),
    ({"vllm_xargs": {"slo_ttft_ms": True}}, "invalid_type"),
    ({"vllm_xargs": {"session_id": "another's"}}, "bad_request"),
    ({"vllm_xargs": {"kv_transfer_params": "x"}}, "bad_request"),
    ({"vllm_xargs": []}, "invalid_type"),
]


@pytest.mark.parametrize("tier", [{}, {"service_tier": "flex"}])
async def test_requests_with_invalid_or_out_of_range_fields_are_refused_before_they_reach_an_engine(
    made: FakeFleet, tier: dict[str, str]
) -> None:
    for wrong, code in ENDLESS:
        answer = await ask(made.urls[0], [user("x")], headers=KEY, **tier, **wrong)
        assert (answer.status, answer.error["code"]) == (400, code), wrong
        assert answer.error["param"].split(".")[0] in wrong and answer.error["message"]
    assert not made.decoder_requests() and not made.prefills()


async def test_the_limit_on_answers_covers_all_prompts_of_a_request(made: FakeFleet) -> None:
    for number in (100, 100.0):
        body = {"model": MODEL, "prompt": ["a"] * 100, "n": number}
        status, error = await post(made, orjson.dumps(body), path="/v1/completions")
        assert (status, error["param"]) == (400, "n") and "may ask for 8" in error["message"]
    assert not made.decoder_requests()


@pytest.mark.parametrize(
    ("path", "prompt", "limit"),
    [
        ("/v1/completions", "prompt", "max_tokens"),
        ("/v1/responses", "input", "max_output_tokens"),
        ("/v1/messages", "messages", "max_tokens"),
        ("/tokenize", "prompt", "priority"),
        ("/v1/embeddings", "input", "dimensions"),
    ],
)
async def test_numbers_out_of_bounds_are_refused_at_every_endpoint(
    made: FakeFleet, path: str, prompt: str, limit: str
) -> None:
    for number in (-5, 10**30):
        body = {"model": MODEL, prompt: [user("x")] if prompt == "messages" else "x", limit: number}
        status, error = await post(made, orjson.dumps(body) if abs(number) < 2**63 else big(body), path=path)
        assert status == 400 and limit in error["message"], error
    assert not made.decoder_requests()


def big(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


async def test_every_parameter_of_common_client_libraries_is_accepted() -> None:
    known = {
        "/v1/chat/completions": chat.completion_create_params.CompletionCreateParamsStreaming,
        "/v1/completions": openai_types.completion_create_params.CompletionCreateParamsStreaming,
        "/v1/responses": responses.response_create_params.ResponseCreateParamsStreaming,
        "/v1/embeddings": openai_types.embedding_create_params.EmbeddingCreateParams,
        "/v1/messages": anthropic_beta.message_create_params.MessageCreateParamsStreaming,
    }
    for path, parameters in known.items():
        names = parameters.__required_keys__ | parameters.__optional_keys__
        check_fields(path, dict.fromkeys(names))
        assert parameters.__required_keys__ <= FIELDS[path].keys()


async def test_a_conversation_id_of_10_kb_is_refused(made: FakeFleet) -> None:
    answer = await ask(made.urls[0], [user("x")], headers={**KEY, "x-session-id": "i" * 10_000})
    assert (answer.status, answer.error["code"]) == (400, "bad_request")
    answer = await ask(made.urls[0], [user("x")], headers=KEY, session_id="i" * 10_000)
    assert answer.status == 400
    assert (await get(f"{made.urls[0]}/v1/conversations/{'i' * 5000}", headers=KEY))[0] == 400


async def test_a_body_that_is_too_large_is_refused(made: FakeFleet) -> None:
    status, error = await post(made, b'{"model": "small", "x": "' + b"x" * (2 << 20) + b'"}')
    assert (status, error["code"]) == (413, "request_too_large")


async def test_too_many_headers_are_refused(made: FakeFleet) -> None:
    answer = await ask(made.urls[0], [user("x")], headers={**KEY, **{f"x-{n}": "v" for n in range(1000)}})
    assert answer.status == 431


async def test_a_prompt_beyond_the_context_gets_the_engines_error_and_leaves_no_state(
    made: FakeFleet,
) -> None:
    answer = await ask(made.urls[0], [user("x" * 60_000)], headers=KEY)
    assert answer.status == 400
    assert "maximum context length" in answer.error["message"]
    await made.settle()
    assert len(made.directory.table.conversations) == 0


async def test_embeddings_of_a_generating_model_are_refused(made: FakeFleet) -> None:
    answer = await ask(made.urls[0], "x", path="/v1/embeddings", headers=KEY)
    assert (answer.status, answer.error["code"]) == (400, "unsupported")


async def test_unknown_paths_and_methods_are_refused(made: FakeFleet) -> None:
    assert (await get(f"{made.urls[0]}/v2/none", headers=KEY))[0] == 404
    assert (await get(f"{made.urls[0]}/v1/chat/completions", headers=KEY))[0] == 405
    status, models = await get(f"{made.urls[0]}/v1/models", headers=KEY)
    assert [model["id"] for model in models["data"]] == [MODEL, "alias"]
    longest = next(iter(made.engines.values())).max_context
    assert {model["max_model_len"] for model in models["data"]} == {longest}
    assert (await get(f"{made.urls[0]}/v1/models/alias", headers=KEY))[0] == status == 200
    assert (await get(f"{made.urls[0]}/v1/models/none", headers=KEY))[0] == 404
    status, ready = await get(f"{made.urls[0]}/ready")
    assert (status, ready["engines"]) == (200, 2)
    status, text = await get(f"{made.urls[0]}/metrics", headers={"authorization": "Bearer boss"})
    assert "conserve_conversations_live" in text
    assert "conserve_client_connections 1.0" in text


async def test_a_tokenize_request_is_answered_by_any_engine(made: FakeFleet) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{made.urls[0]}/tokenize", json={"prompt": "ab"}, headers=KEY) as response,
    ):
        assert (await response.json())["tokens"] == [97, 98]


async def test_a_request_whose_rest_does_not_arrive_times_out(made: FakeFleet) -> None:
    host, _, port = made.urls[0].removeprefix("http://").partition(":")
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer right\r\n"
        b"content-type: application/json\r\ncontent-length: 100\r\n\r\n"
    )
    for part in (head[:40], head + b'{"model": "sm'):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(part)
        answer = await asyncio.wait_for(reader.read(), 60.0)
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_the_turn_of_a_client_that_stops_reading_is_aborted(made: FakeFleet) -> None:
    host, _, port = made.urls[0].removeprefix("http://").partition(":")
    for engine in made.engines.values():
        engine.token_s = 0.0
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = b'{"model": "small", "messages": [], "stream": true, "max_tokens": 300000}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer right\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: sum(engine.aborted for engine in made.engines.values()) == 1)
    writer.transport.abort()
