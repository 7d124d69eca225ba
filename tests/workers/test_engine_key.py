"""A client without an engine's key can read only its metrics."""

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from workers.engine.engine_key import KEY_HEADER, EngineKeyMiddleware
from workers.keeper.launch import KEY_VARIABLE
from workers.processes import WorkerError

KEY = "the key of these engines"
PATHS = ["/", "/health", "/v1/models", "/v1/completions", "/tokenize", "/openapi.json", "/metrics/x"]


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("served")


async def talk(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> EngineKeyMiddleware:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    routes = [WebSocketRoute("/ws", talk), Route("/{path:path}", answer, methods=["GET", "POST"])]
    return EngineKeyMiddleware(Starlette(routes=routes))  # type: ignore[arg-type]


@pytest.fixture
async def engine(app: EngineKeyMiddleware) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_requests_without_the_key_are_refused(
    engine: httpx.AsyncClient, method: str, path: str
) -> None:
    name = KEY_HEADER.decode()
    twice = [(name, KEY), (name, KEY)]
    wrong = [{}, {name: "another"}, {name: ""}, {"authorization": f"Bearer {KEY}"}, twice]
    for headers in wrong:
        refused = await engine.request(method, path, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "engine_key_missing"
    assert (await engine.request(method, path, headers={name: KEY})).text == "served"


async def test_metrics_can_be_read_without_the_key(engine: httpx.AsyncClient) -> None:
    assert (await engine.get("/metrics")).text == "served"


def test_websockets_are_refused_too(app: EngineKeyMiddleware) -> None:
    client = TestClient(app)  # type: ignore[arg-type]
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws"):
        pass
    with client.websocket_connect("/ws", headers={KEY_HEADER.decode(): KEY}):
        pass


def test_an_engine_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(WorkerError, match="is empty"):
        EngineKeyMiddleware(answer)  # type: ignore[arg-type]
