"""Middleware of vLLM's server: grammars are checked before the engine sees them, and refusals have a status.

vLLM begins an answer that is streamed before it looks at the request's grammar, so that a refusal would be an
event of a stream with status 200. What a stream begins with waits here until the engine has the request.
"""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

import orjson
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from workers.engine.compat.grammar_checks import check_grammars
from workers.engine.grammars.checks import GrammarChecks
from workers.engine.grammars.config import ADDRESS, GrammarBudget

_MESSAGES = "/v1/messages"  # Anthropic's, whose errors have another shape
OWNER = b"x-conserve-owner"  # whose request it is, as gateways say

AsgiMessage = MutableMapping[str, Any]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiApp = Callable[[MutableMapping[str, Any], AsgiReceive, AsgiSend], Awaitable[None]]


_ASKED: ContextVar["_HeldStream | None"] = ContextVar("grammar_request", default=None)


class GrammarMiddleware:
    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._checks: GrammarChecks | None = None
        self._address = os.environ[ADDRESS]
        check_grammars(self._check, self._accepted)

    async def __call__(self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        owner = next((value for name, value in scope.get("headers", ()) if name == OWNER), b"")
        held = _HeldStream(send, owner.decode("latin-1"), scope["path"])
        token = _ASKED.set(held)
        try:
            await self._app(scope, receive, held.send)
        finally:
            _ASKED.reset(token)

    async def _check(self, vllm_config: Any, constraint: dict[str, Any]) -> dict[str, Any]:
        if self._checks is None:  # now there is an event loop
            self._checks = GrammarChecks(self._address, GrammarBudget.from_environment(os.environ))
        asked = _ASKED.get()
        try:
            return await self._checks.check(vllm_config, constraint, asked.owner if asked else "")
        except (VLLMValidationError, GracefulHTTPError) as wrong:
            if asked is not None:
                asked.refused = wrong
            raise

    async def _accepted(self) -> None:
        if (asked := _ASKED.get()) is not None:
            await asked.release()


class _HeldStream:
    """Holds what a stream begins with until the engine has its request, or until that was refused."""

    def __init__(self, send: AsgiSend, owner: str, path: str) -> None:
        self.owner, self._path = owner, path
        self.refused: VLLMValidationError | GracefulHTTPError | None = None
        self._send = send
        self._held: list[AsgiMessage] = []
        self._holds = True
        self._answered = False

    async def send(self, message: AsgiMessage) -> None:
        if self._answered:
            return
        if self._holds and (self._held or _begins_stream(message)):
            self._held.append(message)
            if self.refused is not None:
                self._answered = True
                await self._answer(self.refused)
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                await self.release()
            return
        await self._send(message)

    async def release(self) -> None:
        self._holds = False
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _answer(self, wrong: "VLLMValidationError | GracefulHTTPError") -> None:
        status = int(wrong.http_status) if isinstance(wrong, GracefulHTTPError) else 400
        error: dict[str, Any] = {"type": "invalid_request_error", "message": str(wrong)}
        if self._path.startswith(_MESSAGES):
            body = orjson.dumps({"type": "error", "error": error})
        else:
            body = orjson.dumps({"error": {**error, "param": None, "code": status}})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _begins_stream(message: AsgiMessage) -> bool:
    return message["type"] == "http.response.start" and any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )
