"""Middleware of vLLM's server that refuses clients without the engine's key.

The fleet's gateways, its batch process and the engine's keeper have the key. `/metrics` is open, because
Prometheus reads it.
"""

import hmac
import os

from workers.engine.asgi_messages import App, Receive, Scope, Send, answer_json
from workers.keeper.launch import KEY_VARIABLE
from workers.processes import WorkerError

KEY_HEADER = b"x-conserve-key"  # as gateways send it (router/http/upstream.py)
OPEN = "/metrics"
_REFUSED = (
    b'{"error":{"message":"this is an engine of a ConServe fleet: ask its gateway",'
    b'"type":"authentication_error","param":null,"code":"engine_key_missing"}}'
)


class EngineKeyMiddleware:
    """Middleware that answers 401 to requests without the engine's key."""

    def __init__(self, app: App) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "").encode()
        if not self._key:
            raise WorkerError(f"{KEY_VARIABLE} is empty: without a key the engine would answer anybody")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == OPEN) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            await answer_json(send, 401, _REFUSED)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == KEY_HEADER]
        return len(given) == 1 and hmac.compare_digest(given[0], self._key)
