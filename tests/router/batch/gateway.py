"""A gateway of offline work only: the Files and Batch APIs and a dispatcher over given engines."""

import argparse
import asyncio
import hashlib
from collections.abc import Collection
from dataclasses import replace

from openai import AsyncOpenAI
from starlette.requests import Request as AppRequest

from placement.engines import EngineInfo, EngineState, Role
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.batch.flex_turns import FlexTurns, is_flex
from router.batch.service import BatchService
from router.config import GatewayConfig, Model
from router.http import Request, Responder, Server, UpstreamPool
from router.turn import Api, read_turn
from tests.router.batch.fake_engine import MODEL

FAST = DispatchSettings(
    backoff_first_s=0.02,
    backoff_max_s=0.1,
    tick_s=0.02,
    lease_s=1.0,
    cancel_grace_s=0.2,
    request_timeout_s=20.0,
    max_tries=3,
)


def owner_by_bearer(request: AppRequest) -> str:
    """The caller's name space, from its API key. Without one all callers share a name space."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (
        hashlib.sha256(key.encode()).hexdigest()[:32] if scheme.lower() == "bearer" and key else "anonymous"
    )


def engine_info(name: str, http: str, epoch: int = 1, role: Role = Role.DECODE) -> EngineInfo:
    return EngineInfo(name, "tier", role, epoch, http, "", "", 100_000, 16, 8192)


_GENERATING = GatewayConfig(directory="none:1", models=(Model(MODEL),))


class StaticFleet:
    def __init__(self, *addresses: str) -> None:
        self.infos = [engine_info(f"e{index}", address) for index, address in enumerate(addresses)]
        self.states: dict[str, EngineState] = {}

    def engines(self) -> list[EngineInfo]:
        return list(self.infos)

    def state(self, engine: str) -> EngineState | None:
        return self.states.get(engine)

    def models(self) -> Collection[str] | None:
        return (MODEL,)


class Gateway:
    def __init__(
        self,
        store_url: str,
        files_url: str,
        fleet: StaticFleet,
        dispatch: DispatchSettings = FAST,
        limits: BatchLimits | None = None,
    ) -> None:
        self.config = BatchConfig(store_url, files_url, limits or BatchLimits(), dispatch, flex_timeout_s=2.0)
        self.fleet = fleet
        self.url = ""

    async def start(self, port: int = 0) -> None:
        self._pool = UpstreamPool()
        self.service = BatchService(self.config, self.fleet, self._pool, owner_by_bearer)
        self.running = self.service.start()
        self._apis = self.service.mounts()["/v1/batches"]
        self._flex = FlexTurns(self.service.flex, self._pool)
        self._server = Server(self._handle)
        self.url = f"http://127.0.0.1:{await self._server.start('127.0.0.1', port)}"

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/v1/chat/completions":
            turn = await read_turn(Api.CHAT, request, "space", _GENERATING, 0.0)
            assert is_flex(turn)
            await self._flex.serve(turn, responder)
        else:
            await self._apis(request, responder)

    async def stop(self) -> None:
        await self._server.drain(1.0)
        await self.service.stop()
        await self._pool.close()

    def client(self, key: str = "sk-one") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


async def _main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--store", required=True)
    options.add_argument("--files", required=True)
    options.add_argument("--blind-window", type=int, default=16)
    options.add_argument("engines", nargs="+")
    given = options.parse_args()
    dispatch = replace(FAST, blind_window=given.blind_window)
    gateway = Gateway(given.store, given.files, StaticFleet(*given.engines), dispatch)
    await gateway.start(given.port)
    print(gateway.url, flush=True)
    await gateway.running


if __name__ == "__main__":
    asyncio.run(_main())
