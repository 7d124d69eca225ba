"""Ray Serve in the layout of Serve LLM: an HTTP ingress that streams from a replica beside the engine.

    python ray_serve.py PORT ENGINE_URL FOLDER

Run by the Python of an environment that has only `ray[serve]` (requirements/peers.txt): nothing of ours is
imported. What the engine sends is passed on in the pieces in which it comes, unparsed; Serve LLM parses and
validates it, and costs more.
"""

import json
import sys
from collections.abc import AsyncIterator

import aiohttp
import ray
from fastapi import FastAPI, Request
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.responses import StreamingResponse

api = FastAPI()
MANY = 4096  # requests at once, before Serve holds them back


@serve.deployment(max_ongoing_requests=MANY)
class Replica:
    """Where Serve LLM has its engine."""

    def __init__(self, engine: str) -> None:
        self._url = f"{engine}/v1/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def chat(self, body: bytes) -> AsyncIterator[bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=MANY))
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as answer:
            async for piece in answer.content.iter_any():
                yield piece


@serve.deployment(max_ongoing_requests=MANY)
@serve.ingress(api)
class Ingress:
    def __init__(self, replica: DeploymentHandle) -> None:
        self._chat = replica.options(method_name="chat", stream=True)

    @api.get("/health")
    async def health(self) -> dict[str, str]:
        return {"status": "ok"}

    @api.post("/v1/chat/completions")
    async def chat(self, request: Request) -> StreamingResponse:
        body = await request.body()
        kind = "text/event-stream" if json.loads(body).get("stream") else "application/json"
        return StreamingResponse(self._chat.remote(body), media_type=kind)


if __name__ == "__main__":
    port, engine, folder = sys.argv[1:]
    ray.init(num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, _temp_dir=folder)
    quiet = {"enable_access_log": False}
    serve.start(http_options={"host": "127.0.0.1", "port": int(port)}, logging_config=quiet)
    serve.run(Ingress.bind(Replica.bind(engine)), blocking=True, logging_config=quiet)  # type: ignore[attr-defined]
