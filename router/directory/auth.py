"""Only who knows the fleet's secret may ask or tell the directory anything."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

_KEY = "x-conserve-secret"


def metadata(secret: str) -> tuple[tuple[str, str], ...]:
    return ((_KEY, secret),)


def saying(secret: str) -> list[Any]:
    """Interceptors that add the secret to a client's calls."""
    return [_SayOnce(secret), _SayToStream(secret)] if secret else []


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


class _Saying:
    def __init__(self, secret: str) -> None:
        self._metadata = metadata(secret)

    def _details(self, details: Any) -> Any:
        return details._replace(metadata=grpc.aio.Metadata(*self._metadata))


class _SayOnce(_Saying, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._details(client_call_details), request)


class _SayToStream(_Saying, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._details(client_call_details), request)
