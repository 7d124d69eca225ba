"""Adapter that runs an ASGI application (Starlette) behind the server of `router/http`.

Request and response bodies stream with back-pressure both ways. Lifespan events are the caller's business:
what an application needs is made before the server starts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as AppRequest
from starlette.responses import Response

from router.errors import ApiError, BadRequest, ClientLeft, MethodNotAllowed, NotFound
from router.http.request import RawHeaders, Request, end_to_end
from router.http.response import Handler, Responder

log = logging.getLogger("conserve.router.http.asgi")

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


def asgi_handler(application: Application) -> Handler:
    """Return a handler that runs ``application`` for every request."""

    async def handle(request: Request, responder: Responder) -> None:
        exchange = _AsgiExchange(request, responder)
        try:
            await application(_scope(request), exchange.receive, exchange.send)
        except (ClientLeft, ClientDisconnect):
            log.info("client left method=%s path=%r", request.method, request.path)

    return handle


async def _api_error(_: AppRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers)


async def _http_error(request: AppRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return await _api_error(request, NotFound(f"There is no {request.url.path} here."))
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow")
        message = f"{request.url.path} does not take {request.method}; it takes {allow}."
        return await _api_error(request, MethodNotAllowed(message, allow=allow))
    answer = await _api_error(request, BadRequest(str(error.detail)))
    answer.status_code = error.status_code
    return answer


# For ``Starlette(exception_handlers=OPENAI_ERRORS)``: its own errors, and ours, in the OpenAI shape.
OPENAI_ERRORS: Mapping[Any, Callable[[AppRequest, Exception], Awaitable[Response]]] = {
    ApiError: _api_error,
    HTTPException: _http_error,
}


def _scope(request: Request) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version,
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.raw_path or quote(request.path).encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers],
        "client": request.peer,
        "server": None,
        "state": {},
    }


class _AsgiExchange:
    def __init__(self, request: Request, responder: Responder) -> None:
        self._body = request.body
        self._responder = responder
        self._body_given = False
        self.head: tuple[int, RawHeaders] | None = None

    async def receive(self) -> Message:
        if not self._body_given:
            piece = await self._body.next_piece()
            self._body_given = self._body.exhausted
            return {"type": "http.request", "body": piece, "more_body": not self._body_given}
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._responder.finished and not self._responder.disconnected:
            remove = self._responder.on_disconnect(lambda: gone.set_result(None))
            try:
                await gone
            finally:
                remove()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Kept until the body begins: an application that fails in between still gets a proper error.
            headers = end_to_end((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
            self.head = (int(message["status"]), headers)
            return
        if self._responder.disconnected:
            raise ClientLeft("the client has left")
        if self.head is not None:
            status, headers = self.head
            self.head = None
            if not any(name.lower() == b"date" for name, _ in headers):
                headers.append((b"date", formatdate(usegmt=True).encode()))
            self._responder.start(status, headers)
        self._responder.write(bytes(message.get("body", b"")))
        if message.get("more_body", False):
            await self._responder.drain()
        else:
            self._responder.finish()
