"""Fleet of fake engines with a real directory and real gateways, connected by real sockets."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from placement.engines import EngineInfo, Role
from placement.routing.placer_settings import Redisaggregation
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.directory import DirectorySettings
from router.directory.server import DirectoryServer
from router.gateway.config import GatewayConfig, ServedModel
from router.gateway.main import Gateway
from tests.support.engines import CURVES, placer
from tests.support.fake_engine import FakeEngine, SeenRequest
from tests.support.waiting import until

MODEL = "small"
REDISAGGREGATE_TOKENS = 2000
_TIMEOUT = aiohttp.ClientTimeout(30)


@dataclass
class FakeFleet:
    engines: dict[str, FakeEngine]
    directory: DirectoryServer
    address: str
    gateways: list[Gateway] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    rounds: int = 0  # how often `feed` has reported all engines

    async def add_gateway(self, **changes: Any) -> str:
        config = GatewayConfig(
            directory=self.address,
            models=(ServedModel(MODEL),),
            name=f"g{len(self.gateways)}",
            port=0,
            place_wait_s=2.0,
            redisaggregation=Redisaggregation(REDISAGGREGATE_TOKENS),
            tokens_per_byte=1.0,
        )
        gateway = Gateway(replace(config, **changes))
        port = await gateway.start()
        await until(lambda: len(gateway.directory.engines))
        self.gateways.append(gateway)
        self.urls.append(f"http://127.0.0.1:{port}")
        return self.urls[-1]

    def decoder_requests(self) -> list[SeenRequest]:
        return self._seen(decoding=True)

    def prefills(self) -> list[SeenRequest]:
        return self._seen(decoding=False)

    def _seen(self, decoding: bool) -> list[SeenRequest]:
        engines = [one for one in self.engines.values() if (one.role is not Role.PREFILL) is decoding]
        return [seen for engine in engines for seen in engine.seen]

    async def feed(self) -> None:
        """Report each engine's state to the directory, as keepers do."""
        while True:
            for engine in tuple(self.engines.values()):
                self.directory.engine_state(engine.state())
            self.rounds += 1
            await asyncio.sleep(0.02)

    async def release(self, info: EngineInfo, key: str) -> None:
        self.engines[info.engine].release(key)

    async def prefetch(self, info: EngineInfo, key: str, due_in_s: float) -> bool:
        return self.engines[info.engine].prefetch(key, due_in_s)

    async def send(self, source: EngineInfo, target: EngineInfo, key: str) -> int:
        """Send a conversation's KV as a keeper does; return 0, the number of tokens computed again."""
        self.engines[target.engine].held[key] = self.engines[source.engine].held[key]
        return 0

    async def settle(self) -> None:
        """Wait until the directory knows that all turns ended, and gateways have the engines' newest reports.

        A part of the wait is counted in rounds of `feed` instead of seconds, because rounds slow down with
        the machine.
        """
        await until(lambda: not any(gateway.directory.unreported for gateway in self.gateways))
        rounds = self.rounds
        await until(lambda: self.rounds >= rounds + 8)
        reported = {name: one.reports for name, one in self.engines.items() if self._known(one)}
        await until(
            lambda: all(
                (state := gateway.directory.engines.state(name)) and state.seq >= seq
                for gateway in self.gateways
                for name, seq in reported.items()
            )
        )

    def _known(self, engine: FakeEngine) -> bool:
        info = self.directory.table.fleet.info(engine.name)
        return info is not None and info.epoch == engine.epoch


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    *,
    decoders: int = 2,
    prefillers: int = 1,
    gateways: int = 1,
    ttl_s: float = 600.0,
    gateway_grace_s: float = 0.2,
    engine: dict[str, Any] | None = None,
    placing: dict[str, Any] | None = None,
    curves: Mapping[str, PrefillCurve] = CURVES,
    sends: bool = False,
    **config: Any,
) -> AsyncIterator[FakeFleet]:
    engines = {f"p{n}": FakeEngine(f"p{n}", Role.PREFILL, **(engine or {})) for n in range(prefillers)}
    engines |= {f"d{n}": FakeEngine(f"d{n}", **(engine or {})) for n in range(decoders)}
    for one in engines.values():
        await one.start()
    made = FakeFleet(engines, None, "")  # type: ignore[arg-type]
    settings = DirectorySettings(ttl_s=ttl_s, gateway_grace_s=gateway_grace_s, push_states_s=0.1)
    placing = {"redisaggregation": Redisaggregation(REDISAGGREGATE_TOKENS), **(placing or {})}
    journal = tmp_path / "journal"
    made.directory = DirectoryServer(
        settings,
        placer(curves, **placing),
        journal,
        made.release,
        secret="s3cret",
        prefetch=made.prefetch,
        send=made.send if sends else None,
    )
    made.address = f"127.0.0.1:{await made.directory.start('127.0.0.1', 0)}"
    for one in engines.values():
        made.directory.engine_up(one.info)
    feeding = asyncio.create_task(made.feed())
    try:
        for _ in range(gateways):
            await made.add_gateway(directory_secret="s3cret", **config)
        yield made
    finally:
        for gateway in made.gateways:
            await gateway.stop(0.2)
        feeding.cancel()
        await made.directory.stop(0.1)
        for one in engines.values():
            await one.stop()


@dataclass
class GatewayAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def conversation(self) -> str:
        return self.headers["x-conversation-id"]

    @property
    def error(self) -> dict[str, Any]:
        return dict(orjson.loads(self.body)["error"])


async def ask(
    url: str,
    messages: list[dict[str, Any]] | str,
    *,
    headers: dict[str, str] | None = None,
    path: str = "/v1/chat/completions",
    **body: Any,
) -> GatewayAnswer:
    if path in ("/v1/chat/completions", "/v1/messages"):
        body = {"messages": messages, **body}
    elif path == "/v1/completions":
        body = {"prompt": messages, **body}
    else:
        body = {"input": messages, **body}
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as session,
        session.post(f"{url}{path}", json={"model": MODEL, **body}, headers=headers) as response,
    ):
        got = {name.lower(): value for name, value in response.headers.items()}
        return GatewayAnswer(response.status, got, await response.read())


async def get(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(timeout=_TIMEOUT) as session,
        session.request(method, url, headers=headers) as response,
    ):
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, orjson.loads(text) if is_json else text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
