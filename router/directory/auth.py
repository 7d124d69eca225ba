"""Only who knows the fleet's secret may ask or tell the directory anything."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_KEY = "x-conserve-secret"


def metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return ((_KEY, secret),)


class RequireSecret(grpc.aio.ServerInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        given = str(dict(handler_call_details.invocation_metadata).get(_KEY, ""))
        if hmac.compare_digest(given.encode(), self._secret):
            return handler
        if handler is not None and handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the fleet's secret is missing or wrong")
