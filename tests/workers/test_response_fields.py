"""The id of the previous response replaces the engine's null in every kind of answer."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make install")

from workers.engine.response_fields import ResponseFieldsMiddleware

SAYS = {"previous_response_id": None, "conversation": {"id": "conv_1"}}
ECHO = [{"name": "f", "parameters": {"default": {"previous_response_id": None, "response": {}}}}]
TEXT = 'a model may write "previous_response_id":null itself'


async def passed(messages: list[dict[str, Any]], says: dict[str, Any] | None) -> list[dict[str, Any]]:
    got: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(dict(message))

    async def send(message: Any) -> None:
        got.append(message)

    headers = [(b"x-response-says", json.dumps(says).encode())] if says else []
    scope = {"type": "http", "headers": headers}
    await ResponseFieldsMiddleware(app)(scope, None, send)  # type: ignore[arg-type]
    return got


def start(kind: bytes, *more: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *more]}


@pytest.mark.parametrize("says", [SAYS, {"previous_response_id": "resp_0"}])
async def test_fields_are_added_to_a_whole_answer_and_its_length_is_corrected(says: dict[str, Any]) -> None:
    answer = {"id": "resp_1", "tools": ECHO, "output": [TEXT], "previous_response_id": None, "text": ECHO}
    body = json.dumps(answer, separators=(",", ":")).encode()
    sent = [
        start(b"application/json", (b"Content-Length", b"%d" % len(body))),
        {"type": "http.response.body", "body": body},
    ]
    head, whole = await passed(sent, says)
    assert json.loads(whole["body"]) == answer | says
    assert dict(head["headers"])[b"Content-Length"] == b"%d" % len(whole["body"])


async def test_fields_are_added_to_events_that_carry_the_answer() -> None:
    response = {"tools": ECHO, "previous_response_id": None}
    events = [{"type": "response.created", "response": response}, {"delta": TEXT, "item": ECHO}]
    written = [b"data: " + json.dumps(one, separators=(",", ":")).encode() + b"\n\n" for one in events]
    written[0] = b"event: response.created\n" + written[0]
    bodies = [{"type": "http.response.body", "body": one, "more_body": True} for one in written]
    head, first, second = await passed([start(b"text/event-stream"), *bodies], SAYS)
    assert json.loads(first["body"].partition(b"data: ")[2])["response"] == response | SAYS
    assert second == bodies[1]
    assert head == start(b"text/event-stream")


async def test_answers_to_requests_without_the_header_pass_unchanged() -> None:
    body = b'{"previous_response_id":null}'
    sent = [start(b"application/json"), {"type": "http.response.body", "body": body}]
    assert await passed(sent, None) == sent
