"""Response fields: answers of the Responses API say whose history they go on from.

Middleware of vLLM's server. An engine gets the whole history as input (router/answers.py), so that it knows
no answer before its own and says `null`; the gateway says in a header what is to stand there. The field is
looked for unescaped, which no generated text is within JSON.
"""

from typing import Any

import orjson

from workers.token_lines import AsgiApp, AsgiMessage, AsgiReceive, AsgiSend

SAYS = b"x-response-says"  # router/answers.py
_UNSAID = (b'"previous_response_id":null', b'"previous_response_id": null')
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
        for unsaid in _UNSAID:
            body = body.replace(unsaid, self._said)
        head, self._head = self._head, None
        if head is not None:
            longer = len(body) - len(message.get("body", b""))
            head["headers"] = [
                (name, b"%d" % (int(value) + longer) if name.lower() == _LENGTH else value)
                for name, value in head.get("headers", ())
            ]
            await self._send(head)
        await self._send({**message, "body": body})
