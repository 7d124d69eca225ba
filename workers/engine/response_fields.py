"""Middleware of vLLM's server that fills `previous_response_id` of the Responses API.

An engine gets the whole history as input (`router/gateway/responses`), so it knows no earlier answer and
writes `null`. The gateway sends the text for this field in a header. All other text of the response stays as
it is, also fields of the same name that repeat what the client sent, such as schemas of tools.
"""

import json
from typing import Any

import orjson

from workers.engine.asgi_messages import App, Message, Receive, Scope, Send

FIELDS = b"x-response-says"  # router/gateway/responses/stored_answers.py
_FIELD = "previous_response_id"
_NULLS = (b'"previous_response_id":null', b'"previous_response_id": null')
_DATA = b"data: "
_DECODER = json.JSONDecoder(parse_int=float)  # integers of any length
_LENGTH = b"content-length"


class ResponseFieldsMiddleware:
    """Middleware that fills `previous_response_id` in answers to requests with the header `FIELDS`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ()) if scope["type"] == "http" else ()
        fields = next((value for name, value in headers if name == FIELDS), b"")
        await self._app(scope, receive, _FilledAnswer(send, fields).send if fields else send)


class _FilledAnswer:
    """Sender of one answer, in which it replaces the field that is null."""

    def __init__(self, send: Send, fields: bytes) -> None:
        self._send, self._fields = send, orjson.dumps(orjson.loads(fields))[1:-1]
        self._head: Message | None = None  # held until the length of the body is known

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        body = message.get("body", b"")
        if _has_null(body):
            body = self._fill(body) if body.startswith(b"{") else self._fill_events(body)
        head, self._head = self._head, None
        if head is not None:
            added = len(body) - len(message.get("body", b""))
            head["headers"] = [
                (name, b"%d" % (int(value) + added) if name.lower() == _LENGTH else value)
                for name, value in head.get("headers", ())
            ]
            await self._send(head)
        await self._send({**message, "body": body})

    def _fill_events(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(_DATA) and _has_null(line):
                lines[number] = _DATA + self._fill(line.removeprefix(_DATA))
        return b"\n".join(lines)

    def _fill(self, document: bytes) -> bytes:
        """Return the JSON of a response, or of an event that contains a response, with the field filled."""
        text = document.decode("latin-1")  # one character per byte
        try:
            response = _find(text, 0, "response")
            found = _find(text, response[1] if response is not None else 0, _FIELD)
        except (ValueError, IndexError, RecursionError):  # not JSON
            return document
        if found is None or found[2] is not None:
            return document
        name, value, _ = found
        return document[:name] + self._fields + document[value + len("null") :]


def _has_null(body: bytes) -> bool:
    return any(null in body for null in _NULLS)


def _find(text: str, at: int, name: str) -> tuple[int, int, Any] | None:
    """Return where a field of the JSON object at `at` has its name and its value, and the value."""
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        name_at = at
        found, at = _DECODER.raw_decode(text, at)
        value_at = _skip_space(text, _skip_space(text, at) + 1)
        value, at = _DECODER.raw_decode(text, value_at)
        if found == name:
            return name_at, value_at, value
        at = _skip_space(text, at)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return None


def _skip_space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
