"""Sends frozen dataclasses as msgpack over gRPC, with one secret for all calls of a service.

The dataclasses are the only schema. A reader ignores fields that it does not know, and a field that was not
sent has its default, so that two versions of a fleet can talk while one replaces the other. New fields
therefore need defaults, and a field with a new meaning needs a new name.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import msgspec

from router.errors import RouterError

_SECRET, _TERM = "x-conserve-secret", "x-conserve-term"
# gRPC itself never answers with these two codes.
BROKEN = grpc.StatusCode.FAILED_PRECONDITION
SUPERSEDED = grpc.StatusCode.ABORTED
MAX_MESSAGE = ("grpc.max_receive_message_length", 64 << 20)
# A caller that only reads a stream notices within 15 s that the server is out of reach (a pulled cable).
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # the default is two, after which a silent stream never ends
)
# A server ends the connection of a client that pings more often.
_PINGS_ALLOWED = ("grpc.http2.min_ping_interval_without_data_ms", 5_000)

encode = msgspec.msgpack.encode
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = Any  # grpc has no types that mypy could follow


class NoSecret(RouterError, ValueError):
    """The service was given no secret; without a secret it would answer everybody."""


class BadReply(RouterError, ConnectionError):
    """The reply is not a message that this version understands."""


@dataclass(frozen=True, eq=False)
class Method(Generic[Request, Reply]):
    path: str  # /SERVICE/NAME
    request: Any  # types of the messages, as msgspec reads them
    reply: Any


class TermFence:
    """Refuses callers with an older term than the newest that this service has heard of.

    A directory has a greater term than those before it. A caller without a term, such as a command that a
    person runs, is not refused.
    """

    def __init__(self) -> None:
        self._newest = 0

    def refuses(self, term: int) -> str:
        """Return why a caller with this term is refused; an empty text if it is not."""
        if 0 < term < self._newest:
            return "a newer directory has taken over"
        self._newest = max(self._newest, term)
        return ""


class Stub:
    """Client side of a channel. Calls raise grpc.aio.AioRpcError."""

    def __init__(self, channel: Any, secret: str, term: int = 0) -> None:
        """Create a client. With each call it sends `term`, the term of the newest directory it knows."""
        self.term = term
        self._channel = channel
        self._metadata = ((_SECRET, secret),) if secret else ()
        self._calls: dict[Method[Any, Any], tuple[Any, msgspec.msgpack.Decoder[Any]]] = {}

    async def ask(
        self, method: Method[Any, Reply], request: object, timeout_s: float, *, wait_for_ready: bool = False
    ) -> Reply:
        call, decoder = self._call(method, self._channel.unary_unary)
        data = await call(
            encode(request), timeout=timeout_s, metadata=self._told(), wait_for_ready=wait_for_ready
        )
        return _decoded(decoder, data)

    async def stream(
        self,
        method: Method[Any, Reply],
        request: object,
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = True,
    ) -> AsyncIterator[Reply]:
        call, decoder = self._call(method, self._channel.unary_stream)
        answers = call(
            encode(request), timeout=timeout_s, metadata=self._told(), wait_for_ready=wait_for_ready
        )
        try:
            async for data in answers:
                yield _decoded(decoder, data)
        finally:
            answers.cancel()

    def _told(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, (_TERM, str(self.term))) if self.term else self._metadata

    def _call(
        self, method: Method[Any, Reply], open_call: Callable[[str], Any]
    ) -> tuple[Any, "msgspec.msgpack.Decoder[Reply]"]:
        if method not in self._calls:
            self._calls[method] = open_call(method.path), msgspec.msgpack.Decoder(method.reply)
        return self._calls[method]


class Service:
    """Server side of a service. It refuses callers without the secret, and messages that it cannot read."""

    def __init__(
        self,
        secret: str,
        unavailable: tuple[type[Exception], ...],
        broken: tuple[type[Exception], ...] = (),
        refuses: Callable[[int], str] = lambda term: "",
    ) -> None:
        """Create a server. Callers get the text of exceptions in `unavailable` and `broken`.

        After an exception in `unavailable`, another try may help; after one in `broken`, somebody has to
        repair something first. `refuses` returns why a caller with a term is not served. It is called before
        each call and before each message of a stream.
        """
        if not secret:
            raise NoSecret("the secret is empty, so that everybody could call this service; set one")
        self._secret = secret.encode()
        self._codes = dict.fromkeys(unavailable, grpc.StatusCode.UNAVAILABLE) | dict.fromkeys(broken, BROKEN)
        self._expected = (*unavailable, *broken)
        self._refuses = refuses
        self._handlers: dict[str, Any] = {}

    def once(self, method: Method[Request, Reply], handler: Callable[[Request], Awaitable[Reply]]) -> None:
        decoder = msgspec.msgpack.Decoder(method.request)

        async def answer(data: bytes, context: Context) -> bytes:
            request, _ = await self._read(decoder, data, context)
            try:
                return encode(await handler(request))
            except self._expected as wrong:
                await self._refuse(context, wrong)
                raise  # refusing has raised already

        self._handlers[method.path] = grpc.unary_unary_rpc_method_handler(answer)

    def stream(
        self, method: Method[Request, Reply], handler: Callable[[Request], AsyncIterator[Reply]]
    ) -> None:
        decoder = msgspec.msgpack.Decoder(method.request)

        async def answer(data: bytes, context: Context) -> AsyncIterator[bytes]:
            request, term = await self._read(decoder, data, context)
            try:
                async for one in handler(request):
                    await self._check_term(term, context)
                    yield encode(one)
            except self._expected as wrong:
                await self._refuse(context, wrong)

        self._handlers[method.path] = grpc.unary_stream_rpc_method_handler(answer)

    def server(self, options: Iterable[tuple[str, object]] = ()) -> Any:
        made = grpc.aio.server(options=[MAX_MESSAGE, _PINGS_ALLOWED, *options])
        made.add_generic_rpc_handlers((_ByPath(self._handlers),))
        return made

    async def _refuse(self, context: Context, wrong: Exception) -> None:
        code = next(code for kind, code in self._codes.items() if isinstance(wrong, kind))
        await context.abort(code, str(wrong))

    async def _read(
        self, decoder: "msgspec.msgpack.Decoder[Request]", data: bytes, context: Context
    ) -> tuple[Request, int]:
        metadata = dict(context.invocation_metadata())
        given = str(metadata.get(_SECRET, ""))
        if not hmac.compare_digest(given.encode(), self._secret):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the secret is missing or wrong")
        told = str(metadata.get(_TERM, ""))
        term = int(told) if told.isdecimal() and len(told) < 20 else 0
        await self._check_term(term, context)
        try:
            return decoder.decode(data), term
        except msgspec.MsgspecError as wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not understood: {wrong}")
            raise  # abort has raised already

    async def _check_term(self, term: int, context: Context) -> None:
        if why := self._refuses(term):
            await context.abort(SUPERSEDED, why)


class _ByPath(grpc.GenericRpcHandler):
    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _decoded(decoder: "msgspec.msgpack.Decoder[Reply]", data: bytes) -> Reply:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as wrong:
        raise BadReply(f"the answer is not understood: {wrong}") from wrong
