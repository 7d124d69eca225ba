"""Fields unknown to vLLM and the gateway are dropped and named, or refused if the fleet says so."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from prometheus_client import REGISTRY

from router.auth.keys import inline_keys
from router.errors import BadRequest
from router.requests.body_parser import CHEAP_BYTES
from router.requests.fields import FIELDS, MAX_OTHER_BYTES, REFUSED, UnknownFields, check_fields
from router.requests.ignored_fields import MOST_LOGGED, IgnoredFields
from tests.support.fake_fleet import MODEL, FakeFleet, ask, fleet, user

KEY = {"authorization": "Bearer right"}
IGNORED = "x-conserve-ignored-fields"
CODEX = {
    "client_metadata": {"x-codex-installation-id": "u"},
    "include": ["reasoning.encrypted_content"],
    "instructions": "Be a coding agent.",
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "tool_choice": "auto",
    "tools": [],
}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    context = {"max_context": 1_000_000, "kv_tokens": 2_000_000}
    async with fleet(tmp_path, decoders=1, engine=context, keys=inline_keys(("right",), ())) as running:
        yield running


async def sent(made: FakeFleet, raw: bytes, path: str = "/v1/chat/completions") -> tuple[int, str | None]:
    """Send these bytes as body; return the status and the ignored fields that the response names."""
    headers = {**KEY, "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{made.urls[0]}{path}", data=raw, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status, answer.headers.get(IGNORED)


def counted(path: str) -> float:
    return REGISTRY.get_sample_value("conserve_ignored_fields_total", {"path": path}) or 0.0


async def test_a_codex_request_is_served_without_its_unknown_field(made: FakeFleet) -> None:
    before = counted("/v1/responses")
    answer = await ask(made.urls[0], [user("x")], path="/v1/responses", headers=KEY, **CODEX)
    assert (answer.status, answer.headers[IGNORED]) == (200, "client_metadata")
    assert counted("/v1/responses") == before + 1
    for request in (*made.decoder_requests(), *made.prefills()):
        assert b"client_metadata" not in request.raw
    (decoded,) = made.decoder_requests()
    assert all(decoded.body[name] == CODEX[name] for name in ("include", "reasoning", "prompt_cache_key"))


async def test_a_body_of_known_fields_reaches_the_decoder_unchanged(made: FakeFleet) -> None:
    raw = b'{ "model": "small",\t"messages": [{"role": "user", "content": "x"}], "max_tokens":3 }'
    assert await sent(made, raw) == (200, None)
    (request,) = made.decoder_requests()
    assert request.raw.startswith(raw.rstrip(b" }"))


async def test_a_large_body_loses_nothing_but_its_unknown_fields(made: FakeFleet) -> None:
    messages = [{"role": "user", "content": "é" + "x" * 1000}] * (CHEAP_BYTES // 1000)
    fields: dict[str, Any] = {"zeta": {"model": "a"}, "model": MODEL, "messages": messages, "é": [1]}
    fields |= {"max_tokens": 3, "alpha": 0, "metadata": {"frobnicate": '}",{'}}
    raw = orjson.dumps(fields, option=orjson.OPT_INDENT_2)
    raw = raw[:-2] + b',\n "frob\\u006eicate" : 1 , "max_tokens" : 4 }'
    assert await sent(made, raw) == (200, "zeta, %C3%A9, alpha, frobnicate")
    (request,) = made.decoder_requests()
    kept = ("model", "messages", "metadata")
    assert {name: request.body[name] for name in kept} == {name: fields[name] for name in kept}
    assert request.body["max_tokens"] == 4
    assert not request.body.keys() & {"zeta", "é", "alpha", "frobnicate"}


async def test_unknown_fields_of_requests_without_a_conversation_are_dropped_too(made: FakeFleet) -> None:
    body = {"model": MODEL, "prompt": "x", "frobnicate": 1}
    assert await sent(made, orjson.dumps(body), "/tokenize") == (200, "frobnicate")


async def test_a_fleet_that_refuses_unknown_fields_names_them_in_its_error(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, unknown_fields=UnknownFields.REFUSE) as made:
        for path in ("/v1/chat/completions", "/v1/responses"):
            answer = await ask(made.urls[0], [user("x")], path=path, frobnicate=1)
            assert (answer.status, answer.error["code"]) == (400, "unknown_parameter")
            assert answer.error["param"] == "frobnicate"
        assert not made.decoder_requests()


@pytest.mark.parametrize("policy", UnknownFields)
@pytest.mark.parametrize("path", FIELDS)
def test_fields_that_control_an_engine_are_refused_at_every_endpoint(
    path: str, policy: UnknownFields
) -> None:
    for name in REFUSED:
        for value in (1, None):
            with pytest.raises(BadRequest, match="belongs to the fleet"):
                check_fields(path, {"model": "m", name: value}, policy)


async def test_a_forbidden_field_is_refused_even_if_its_name_is_escaped(made: FakeFleet) -> None:
    raw = b'{"model": "small", "messages": [], "k\\u0076_transfer_params": {"remote_host": "x"}}'
    assert (await sent(made, raw))[0] == 400


def test_unknown_fields_count_against_the_limit_on_bytes_of_all_fields() -> None:
    check_fields("/v1/responses", {"client_metadata": "x" * (MAX_OTHER_BYTES - 100)})
    with pytest.raises(BadRequest, match="most of them in client_metadata"):
        check_fields("/v1/responses", {"client_metadata": "x" * MAX_OTHER_BYTES})


async def test_the_header_of_dropped_fields_is_bounded_and_their_names_cannot_inject_headers(
    made: FakeFleet,
) -> None:
    names = ["a\r\nset-cookie: x=1", "n" * 300, *(f"f{number}" for number in range(2000))]
    body: dict[str, Any] = {"model": MODEL, "messages": [user("x")], **dict.fromkeys(names, 1)}
    status, named = await sent(made, orjson.dumps(body))
    assert status == 200 and named is not None
    assert named.startswith(f"a%0D%0Aset-cookie%3A%20x%3D1, {'n' * 64}, f0, ")
    assert named.endswith(f", and {len(names) - 16} more") and len(named) < 500


def test_each_dropped_field_is_logged_once_per_key_up_to_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignored = IgnoredFields()
    with caplog.at_level(logging.INFO, logger="conserve.router.ignored_fields"):
        for key in ("alice", "bob", "alice"):
            ignored.record(key, "/v1/responses", ["client_metadata"])
        assert [line.split("key=")[1] for line in caplog.messages] == [
            f"{key} path=/v1/responses field=client_metadata" for key in ("alice", "bob")
        ]
        for number in range(2 * MOST_LOGGED):
            ignored.record("alice", "/v1/responses", [f"f{number}"])
    assert len(caplog.messages) == MOST_LOGGED
