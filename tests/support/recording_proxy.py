"""Proxy between a client and a gateway, which records requests and answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import ClientConnectionResetError, web

NOT_PASSED_ON = frozenset({"host", "connection", "content-length", "transfer-encoding", "keep-alive"})
TIMEOUT = aiohttp.ClientTimeout(300)


@dataclass
class RecordedExchange:
    """One request, and the part of its answer that has arrived so far."""

    method: str
    target: str
    headers: dict[str, str]  # names in lower case
    body: bytes
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""


@dataclass
class RecordingProxy:
    url: str
    exchanges: list[RecordedExchange] = field(default_factory=list)


@asynccontextmanager
async def recording_proxy(gateway: str) -> AsyncIterator[RecordingProxy]:
    """Listen on a free port, and pass every request on to `gateway`."""
    exchanges: list[RecordedExchange] = []

    async def pass_on(request: web.Request) -> web.StreamResponse:
        exchange = RecordedExchange(
            request.method, request.path_qs, _headers(request.headers), await request.read()
        )
        exchanges.append(exchange)
        target, kept = f"{gateway}{request.path_qs}", _passed_on(request.headers)
        async with session.request(
            request.method, target, headers=kept, data=exchange.body or None
        ) as answer:
            exchange.status, exchange.answer_headers = answer.status, _headers(answer.headers)
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await response.prepare(request)
            with suppress(ClientConnectionResetError):  # some clients leave at the last event
                async for part in answer.content.iter_any():
                    exchange.answer += part
                    await response.write(part)
                await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    async with aiohttp.ClientSession(auto_decompress=False, timeout=TIMEOUT) as session:
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield RecordingProxy(f"http://127.0.0.1:{runner.addresses[0][1]}", exchanges)
        finally:
            await runner.cleanup()


def _headers(headers: "aiohttp.typedefs.LooseHeaders") -> dict[str, str]:
    return {name.lower(): value for name, value in dict(headers).items()}


def _passed_on(headers: "aiohttp.typedefs.LooseHeaders") -> dict[str, str]:
    return {name: value for name, value in _headers(headers).items() if name not in NOT_PASSED_ON}
