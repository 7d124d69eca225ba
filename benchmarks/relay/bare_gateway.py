"""Serves our relay and its observer of streams alone: one endpoint, without identity or placement.

python -m benchmarks.relay.bare_gateway PORT ENGINE_URL [CERTIFICATE KEY]
"""

import asyncio
import sys

import uvloop

from router.http import (
    Certificate,
    Endpoint,
    RelayEnd,
    Request,
    Responder,
    Server,
    StreamObserver,
    UpstreamPool,
    UpstreamRequest,
    relay,
)
from router.process import collect_when_idle, settle_heap


async def serve(port: int, engine: str, certificate: str = "", key: str = "") -> None:
    pool = UpstreamPool()
    endpoint = Endpoint.parse(engine)

    async def handle(request: Request, responder: Responder) -> None:
        body = await request.body.read_pieces()
        headers = request.headers.raw
        upstream = UpstreamRequest(request.method, request.raw_path, headers, body, repeatable=True)
        observer = StreamObserver()
        outcome = await relay(pool, endpoint, upstream, responder, observer)
        if outcome.end is RelayEnd.NOT_STARTED and outcome.error is not None:
            raise outcome.error
        observer.observation()

    server = Server(handle)
    await server.start("127.0.0.1", port, certificate=Certificate(certificate, key) if certificate else None)
    settle_heap()
    collecting = asyncio.create_task(collect_when_idle(lambda: server.idle))
    await server.run_until_signal(1.0)
    collecting.cancel()
    await pool.close()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), *sys.argv[2:]))
