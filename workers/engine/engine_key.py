"""An engine's key: who asks an engine over HTTP shows it: its fleet's gateways, batch process and keeper.

Middleware in front of everything that vLLM's server answers. `/metrics` alone is open: Prometheus reads it.
"""

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from workers.keeper.launch import KEY_VARIABLE
from workers.processes import WorkerError

KEY_HEADER = b"x-conserve-key"  # as gateways send it (router/http/upstream.py)
OPEN = "/metrics"
_REFUSED = (
    b'{"error":{"message":"this is an engine of a ConServe fleet: ask its gateway",'
    b'"type":"authentication_error","param":null,"code":"engine_key_missing"}}'
)

AsgiMessage = MutableMapping[str, Any]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiApp = Callable[[MutableMapping[str, Any], AsgiReceive, AsgiSend], Awaitable[None]]


class EngineKeyMiddleware:
    def __init__(self, app: AsgiApp) -> None:
        self._app, self._key = app, os.environ.get(KEY_VARIABLE, "").encode()
        if not self._key:
            raise WorkerError(f"{KEY_VARIABLE} is empty: without a key everybody could ask this engine")

    async def __call__(self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == OPEN) or self._shown(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            length = str(len(_REFUSED)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSED})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _shown(self, scope: MutableMapping[str, Any]) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == KEY_HEADER]
        return len(given) == 1 and hmac.compare_digest(given[0], self._key)
