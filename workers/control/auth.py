"""Only who knows the fleet's secret may control its engines."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

KEY = "x-conserve-secret"


def metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return ((KEY, secret),)


class RequireSecret(grpc.aio.ServerInterceptor):
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        given = dict(details.invocation_metadata).get(KEY, "")
        if hmac.compare_digest(str(given), self._secret):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_refuse)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(request: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the fleet's secret is missing or wrong")
