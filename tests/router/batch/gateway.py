"""Runs a batch service over given engines, behind a gateway that forwards files, batches and flex turns."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from openai import AsyncOpenAI

from placement.engines import EngineInfo, EngineState, Role
from router.auth.keyring import Keyring
from router.auth.rate_limits import UNMETERED
from router.batch.config import BatchConfig, BatchLimits, DispatchSettings
from router.batch.forwarding import BatchForwarding
from router.batch.service import BatchService
from router.gateway.config import AnswersConfig, BatchAddress, GatewayConfig, ServedModel
from router.gateway.responses.stored_answers import Answers
from router.gateway.slo_classes import SloClasses
from router.gateway.turn.turn import TurnReader
from router.http import Request, Responder, Server, StreamObserver, UpstreamLimits, UpstreamPool
from router.identity.prefix_groups import PrefixGroups
from router.requests.body_parser import Api
from router.requests.cost_limits import PromptLimit
from router.requests.parser_pool import ParserPool
from tests.router.batch.fake_engine import MODEL

SECRET = "s3cret"
FAST = DispatchSettings(
    backoff_first_s=0.02,
    backoff_max_s=0.1,
    tick_s=0.02,
    lost_after_s=1.0,
    cancel_grace_s=0.2,
    request_timeout_s=20.0,
    max_tries=3,
)


def engine_info(name: str, http: str, epoch: int = 1, role: Role = Role.DECODE) -> EngineInfo:
    return EngineInfo(name, "tier", role, epoch, http, "", "", 100_000, 16, 8192)


class StaticFleet:
    def __init__(self, *addresses: str) -> None:
        self.infos = [engine_info(f"e{index}", address) for index, address in enumerate(addresses)]
        self.states: dict[str, EngineState] = {}

    def engines(self) -> list[tuple[EngineInfo, EngineState | None]]:
        return [(info, self.states.get(info.engine)) for info in self.infos]


def batch_config(store_url: str, files_url: str, port: int = 0) -> BatchConfig:
    return BatchConfig(
        store_url,
        files_url,
        models=(ServedModel(MODEL, embeddings=True),),
        directory="none:1",
        secret=SECRET,
        key=SECRET,
        port=port,
        dispatch=FAST,
        flex_timeout_s=2.0,
    )


class FrontGateway:
    """Gateway that authenticates callers and forwards their requests; of turns, it serves only flex turns."""

    def __init__(self, batch: str, secret: str = SECRET, upstream: UpstreamLimits | None = None) -> None:
        """Create a gateway. `batch` is the host:port of the batch process, which may not be running."""
        self._config = GatewayConfig(directory="none:1", models=(ServedModel(MODEL),))
        self.keys = Keyring((), None)
        self._pool = UpstreamPool(upstream)
        self._forwarding = BatchForwarding(BatchAddress(batch, secret), self._pool)
        self._server = Server(self._handle)
        self._answers = Answers(AnswersConfig())
        self.url = ""

    async def start(self) -> str:
        self.url = f"http://127.0.0.1:{await self._server.start('127.0.0.1', 0)}"
        return self.url

    async def _handle(self, request: Request, responder: Responder) -> None:
        key = self.keys.authenticate(request.headers)
        if request.path == "/v1/chat/completions":
            models, pieces = self._config.models_by_name, await request.body.read_pieces()
            classes = SloClasses(self._config)
            limit, unknown = PromptLimit(1_000_000), self._config.unknown_fields
            reader = TurnReader(ParserPool(), PrefixGroups(), classes, self._answers, lambda: limit, unknown)
            turn = await reader.read(Api.CHAT, request, pieces, key, models, UNMETERED, 0.0)
            await self._forwarding.flex(turn, responder, StreamObserver())
        else:
            await self._forwarding.handle(request, responder, key)

    async def stop(self) -> None:
        await self._server.drain(1.0)
        await self._forwarding.close()
        await self._pool.close()

    def client(self, key: str = "sk-one") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)


class GatewayWithBatch:
    """Gateway and batch service that both run in the test's process."""

    def __init__(
        self,
        store_url: str,
        files_url: str,
        fleet: StaticFleet,
        dispatch: DispatchSettings = FAST,
        limits: BatchLimits | None = None,
        models: tuple[ServedModel, ...] | None = None,
    ) -> None:
        self.config = replace(
            batch_config(store_url, files_url), dispatch=dispatch, limits=limits or BatchLimits()
        )
        if models is not None:
            self.config = replace(self.config, models=models)
        self.fleet = fleet

    async def start(self) -> None:
        self.service = BatchService(self.config, self.fleet.engines)
        self.batch = f"127.0.0.1:{await self.service.start()}"
        self.front = FrontGateway(self.batch)
        self.url = await self.front.start()

    async def stop(self) -> None:
        await self.front.stop()
        await self.service.stop()

    def client(self, key: str = "sk-one") -> AsyncOpenAI:
        return self.front.client(key)


async def _main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--store", required=True)
    options.add_argument("--files", type=Path, required=True)
    options.add_argument("--blind-window", type=int, default=16)
    options.add_argument("engines", nargs="+")
    given = options.parse_args()
    config = batch_config(given.store, str(given.files), given.port)
    dispatch = replace(FAST, blind_window=given.blind_window)
    service = BatchService(replace(config, dispatch=dispatch), StaticFleet(*given.engines).engines)
    print(await service.start(), flush=True)
    await service.run_until_signal()


if __name__ == "__main__":
    asyncio.run(_main())
