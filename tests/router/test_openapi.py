"""`/openapi.json` describes the routes, fields and bounds that the gateway enforces."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.errors import BadRequest
from router.gateway.config import AnswersConfig, BatchAddress, GatewayLimits
from router.requests import fields
from tests.support.fake_fleet import FakeFleet, ask, fleet, user


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[FakeFleet]:
    answers = AnswersConfig(str(tmp_path / "answers.sqlite"))
    batch = BatchAddress("127.0.0.1:9")  # no batch process is running
    async with fleet(tmp_path, decoders=1, prefillers=0, answers=answers, batch=batch) as running:
        yield running


async def described(made: FakeFleet) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=made.urls[0]) as http:
        answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_the_openapi_document_has_exactly_the_served_paths_and_methods(made: FakeFleet) -> None:
    paths = (await described(made))["paths"]
    async with httpx.AsyncClient(base_url=made.urls[0]) as http:
        for path, operations in paths.items():
            if path.startswith(("/v1/files", "/v1/batches")):
                continue
            for method in ("GET", "POST", "DELETE", "PUT"):
                answer = await http.request(method, path.replace("{id}", "x"), json={})
                assert (answer.status_code == 405) is (method.lower() not in operations), (method, path)


async def test_the_bounds_of_fields_in_the_openapi_document_are_those_that_the_gateway_checks(
    made: FakeFleet,
) -> None:
    paths = (await described(made))["paths"]
    for path, known in {**fields.FIELDS, "/v1/messages/count_tokens": fields.FIELDS["/v1/messages"]}.items():
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() == known.keys()
        assert schema["additionalProperties"] is True
        assert set(schema["required"]) <= known.keys()
        for name, said in schema["properties"].items():
            if said.get("type") in ("integer", "number") and "maximum" in said and name != "n":
                fields.check_fields(path, {name: said["maximum"]})
                with pytest.raises(BadRequest):
                    fields.check_fields(path, {name: said["maximum"] * 2 + 1})


async def test_the_limit_of_answers_in_the_openapi_document_is_the_configured_one(tmp_path: Path) -> None:
    async with fleet(tmp_path, decoders=1, prefillers=0, limits=GatewayLimits(answers=3)) as made:
        paths = (await described(made))["paths"]
        for path in ("/v1/chat/completions", "/v1/completions"):
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema["properties"]["n"] == {"type": "integer", "minimum": 1, "maximum": 3}
        assert (await ask(made.urls[0], [user("hi")], n=3)).status == 200
        assert (await ask(made.urls[0], [user("hi")], n=4)).status == 400


async def test_the_openapi_document_allows_messages_without_content(made: FakeFleet) -> None:
    paths = (await described(made))["paths"]
    for path in ("/v1/chat/completions", "/v1/messages"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        message = schema["properties"]["messages"]["items"]
        assert message["required"] == ["role"]  # an assistant's message with tool calls has no content
        assert message["properties"] == {"role": {"type": "string"}, "content": {}}
    said: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        user("hi"),
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "21"}]},
    ]
    assert (await ask(made.urls[0], said)).status == 200
