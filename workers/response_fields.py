"""Response fields: answers of the Responses API say whose history they go on from.

Middleware of vLLM's server. An engine gets the whole history as input (router/answers.py), so that it knows
no answer before its own and says `null`; the gateway says in a header what is to stand there. Only the
response's own field is another then: what a client sent, and the answer echoes (tools' schemas), may have one
of that name too. All else stays as it is written.
"""

import json
from typing import Any

import orjson

from workers.token_lines import AsgiApp, AsgiMessage, AsgiReceive, AsgiSend

SAYS = b"x-response-says"  # router/answers.py
_FIELD = "previous_response_id"
_UNSAID = (b'"previous_response_id":null', b'"previous_response_id": null')
_DATA = b"data: "
_DECODER = json.JSONDecoder(parse_int=float)  # whole numbers of any length
_LENGTH = b"content-length"


class ResponseFieldsMiddleware:
    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        headers = scope.get("headers", ()) if scope["type"] == "http" else ()
        said = next((value for name, value in headers if name == SAYS), b"")
        await self._app(scope, receive, _Saying(send, said).send if said else send)


class _Saying:
    def __init__(self, send: AsgiSend, said: bytes) -> None:
        self._send, self._said = send, orjson.dumps(orjson.loads(said))[1:-1]
        self._head: AsgiMessage | None = None  # until the length of what follows is known

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        body = message.get("body", b"")
        if any(unsaid in body for unsaid in _UNSAID):
            body = self._whole(body) if body.startswith(b"{") else self._events(body)
        head, self._head = self._head, None
        if head is not None:
            longer = len(body) - len(message.get("body", b""))
            head["headers"] = [
                (name, b"%d" % (int(value) + longer) if name.lower() == _LENGTH else value)
                for name, value in head.get("headers", ())
            ]
            await self._send(head)
        await self._send({**message, "body": body})

    def _events(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(_DATA) and any(unsaid in line for unsaid in _UNSAID):
                lines[number] = _DATA + self._whole(line.removeprefix(_DATA))
        return b"\n".join(lines)

    def _whole(self, document: bytes) -> bytes:
        """Of a response, or of an event that has one."""
        text = document.decode("latin-1")  # a character a byte
        try:
            response = _field(text, 0, "response")
            found = _field(text, response[1] if response is not None else 0, _FIELD)
        except (ValueError, IndexError, RecursionError):  # no JSON that could be read
            return document
        if found is None or found[2] is not None:
            return document
        name, value, _ = found
        return document[:name] + self._said + document[value + len("null") :]


def _field(text: str, at: int, name: str) -> tuple[int, int, Any] | None:
    """Of the object that begins there: where its name stands, where its value, and the value."""
    at = _next(text, at + 1)
    while text[at] != "}":
        named_at = at
        named, at = _DECODER.raw_decode(text, at)
        value_at = _next(text, _next(text, at) + 1)
        value, at = _DECODER.raw_decode(text, value_at)
        if named == name:
            return named_at, value_at, value
        at = _next(text, at)
        if text[at] == ",":
            at = _next(text, at + 1)
    return None


def _next(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
