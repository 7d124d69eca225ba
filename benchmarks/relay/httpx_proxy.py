"""Serves a proxy as one usually writes it first: FastAPI in front, httpx behind.

python -m benchmarks.relay.httpx_proxy PORT ENGINE_URL
"""

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse


def application(engine: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=engine, timeout=None, limits=limits)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        body = await request.body()
        sending = client.build_request("POST", request.url.path, content=body, headers=headers)
        answer = await client.send(sending, stream=True)
        kind = answer.headers["content-type"]
        if not kind.startswith("text/event-stream"):
            return Response(await answer.aread(), answer.status_code, media_type=kind)

        async def pieces() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece
            await answer.aclose()

        return StreamingResponse(pieces(), answer.status_code, media_type=kind)

    return app


if __name__ == "__main__":
    app = application(sys.argv[2])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
