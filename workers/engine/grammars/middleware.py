"""Middleware of vLLM's server that checks grammars and gives refusals an HTTP status.

vLLM begins a stream before it reads the request's grammar, so a refusal would be an event of a stream with
status 200. This middleware holds the beginning of a stream until the engine has accepted the request.
"""

import os
from contextvars import ContextVar
from typing import Any

import orjson
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from workers.engine.asgi_messages import App, Message, Receive, Scope, Send, answer_json, is_event_stream
from workers.engine.compat.grammar_checks import check_grammars
from workers.engine.grammars.checks import GrammarChecks
from workers.engine.grammars.config import ADDRESS, GrammarBudget

_MESSAGES = "/v1/messages"  # Anthropic's API, whose errors have another shape
OWNER = b"x-conserve-owner"  # header that gateways set

_ASKED: ContextVar["_HeldStream | None"] = ContextVar("grammar_request", default=None)


class GrammarMiddleware:
    def __init__(self, app: App) -> None:
        self._app = app
        self._checks: GrammarChecks | None = None
        self._address = os.environ[ADDRESS]
        check_grammars(self._check, self._accepted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        if self._checks is None:  # needs an event loop
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
    """Sender that holds back the beginning of a stream until the engine accepts or refuses its request."""

    def __init__(self, send: Send, owner: str, path: str) -> None:
        self.owner, self._path = owner, path
        self.refused: VLLMValidationError | GracefulHTTPError | None = None
        self._send = send
        self._held: list[Message] = []
        self._holds = True
        self._answered = False

    async def send(self, message: Message) -> None:
        if self._answered:
            return
        if self._holds and (self._held or is_event_stream(message)):
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
        await answer_json(self._send, status, body)
