"""Pulls cables between a gateway, a directory and two engines on hosts of their own, while clients wait.

    python -m tests.support.cabled_fleet SECONDS FOLDER

Runs within `tests.support.cables.apart`, and prints what clients saw, as JSON. The engines are fake, with the
control service of their keepers; the rest is the product's own processes.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from benchmarks.harness.steady_clients import SteadyClients
from deploy.directory.config import HostedDirectoryConfig
from placement.routing.placer_settings import PlacerSettings
from placement.scheduling.prefill_curve import PrefillCurve
from router.directory.api.messages import STATUS
from router.directory.api.rpc import Stub
from router.directory.directory import DirectorySettings
from router.gateway.config import GatewayConfig, ServedModel, dump
from tests.support.cables import FRONT, CabledNetwork, on
from tests.support.kept_engine import CONTROL_PORT

HEAD, BACKS = "head", ("back0", "back1")
MODEL, SECRET, PORT, GATEWAY_PORT = "small", "secret-of-this-test", 7000, 8000
LEASE_S = 5.0
WAYS = ("both", "there", "back")
QUIET_S, SETTLE_S, START_S, SILENCE_S = 2.0, 30.0, 120.0, 60.0


@dataclass
class Pulled:
    """Record of one pulled cable: how long clients waited, and how many requests failed."""

    cable: str
    seconds: float
    waits_s: dict[str, float]  # longest wait for a token, by kind of client
    recovered_s: float  # from plugging in until every client had a new token
    failures: dict[str, int]


class CabledFleet:
    def __init__(self, network: CabledNetwork, folder: Path) -> None:
        self.network, self._folder = network, folder
        self.url = f"http://{network.address(FRONT)}:{GATEWAY_PORT}"
        self.directory = f"{network.address(HEAD)}:{PORT}"
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        address, folder = self.network.address, self._folder
        for number, host in enumerate(BACKS):
            engine = await self._run(
                host, "tests.support.kept_engine", f"d{number}", address(host), SECRET, pipe=True
            )
            assert engine.stdout is not None
            assert await asyncio.wait_for(engine.stdout.readline(), START_S), f"no engine on {host}"
        keepers = folder / "keepers.json"
        keepers.write_text(
            json.dumps({f"d{number}": f"{address(host)}:{CONTROL_PORT}" for number, host in enumerate(BACKS)})
        )
        hosted = HostedDirectoryConfig(
            settings=DirectorySettings(600.0),
            placer=PlacerSettings(headroom_tokens=100),
            curves={tier: PrefillCurve(0.01, 1e-5, 0.0) for tier in ("prefill", "decode")},
            alike={},
            journal=str(folder / "journal"),
            keepers=str(keepers),
            host=address(HEAD),
            port=PORT,
            secret=SECRET,
            keepers_key=SECRET,
            lease_s=LEASE_S,
        )
        gateway = GatewayConfig(
            self.directory,
            (ServedModel(MODEL),),
            name="g0",
            host=address(FRONT),
            port=GATEWAY_PORT,
            metrics_host=address(FRONT),
            place_wait_s=2.0,
            directory_secret=SECRET,
        )
        for name, content in (("directory", hosted.dump()), ("gateway", dump(gateway))):
            (folder / f"{name}.json").write_bytes(content)
        await self._run(HEAD, "deploy.directory", "--config", str(folder / "directory.json"))
        await self._run(FRONT, "router.gateway.main", "--config", str(folder / "gateway.json"))

    async def _run(self, host: str, *command: str, pipe: bool = False) -> asyncio.subprocess.Process:
        log = (self._folder / f"{host or 'front'}.log").open("ab")
        process = await asyncio.create_subprocess_exec(
            *(*on(host), sys.executable, "-m", *command),
            stdout=asyncio.subprocess.PIPE if pipe else log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._processes.append(process)
        return process

    def ended(self) -> list[int | None]:
        """Return the exit statuses of those processes of the fleet that have ended."""
        return [one.returncode for one in self._processes if one.returncode is not None]

    async def until_engines(self, count: int) -> None:
        """Wait until the directory knows `count` engines."""
        async with asyncio.timeout(SILENCE_S), grpc.aio.insecure_channel(self.directory) as channel:
            while len((await Stub(channel, SECRET).ask(STATUS, None, 5.0)).engines) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def conversations_on(self, engine: str) -> int:
        async with grpc.aio.insecure_channel(self.directory) as channel:
            status = await Stub(channel, SECRET).ask(STATUS, None, 5.0)
        return next(one.conversations for one in status.engines if one.info.engine == engine)

    async def left(self) -> list[str]:
        """Wait until directory and engines agree on the KV in use; return the differences that remain."""
        deadline, found = time.monotonic() + SETTLE_S, ["the directory has not answered"]
        async with grpc.aio.insecure_channel(self.directory) as channel:
            while found and time.monotonic() < deadline:
                await asyncio.sleep(0.5)
                status = await Stub(channel, SECRET).ask(STATUS, None, 5.0)
                found = [
                    f"{one.info.engine}: {one.kv_in_use} in use, {one.state.live_tokens} reported"
                    for one in status.engines
                    if one.kv_in_use != one.state.live_tokens or one.suspect
                ]
                if len(status.engines) != len(BACKS):
                    found.append(f"{len(status.engines)} engines")
        return found


async def decoders_of(url: str, clients: SteadyClients) -> dict[str, str]:
    """Return the decoder of each conversation that clients continue, by the conversation's name."""
    found = {}
    async with aiohttp.ClientSession(url, headers={"authorization": "Bearer steady"}) as http:
        for client in clients.clients:
            if client.kind != "new":
                async with http.get(f"/v1/conversations/{client.name}") as answer:
                    found[client.name] = (await answer.json()).get("decoder")
    return found


async def pulled(
    network: CabledNetwork, clients: SteadyClients, cable: tuple[str, str], ways: str, seconds: float
) -> Pulled:
    """Pull a cable for `seconds`, plug it in again, and wait until every client is answered."""
    one, other = cable
    links = {"both": [(one, other), (other, one)], "there": [(one, other)], "back": [(other, one)]}[ways]
    await asyncio.sleep(QUIET_S)
    began = time.monotonic()
    for link in links:
        await asyncio.to_thread(network.pull, *link)
    await asyncio.sleep(seconds)
    for link in links:
        await asyncio.to_thread(network.plug_in, *link)
    mended = time.monotonic()
    await clients.all_answered()
    ended = time.monotonic()
    waits = {kind: end - begin for kind, (begin, end) in clients.longest_waits(began, ended).items()}
    name = f"{one or 'front'}-{other} {ways}"
    failures = dict(clients.failures(began, ended).most_common(6))
    return Pulled(name, round(seconds, 1), waits, ended - mended, failures)


@dataclass
class Silenced:
    """Record of one unreachable host: when its engine counted as gone, and when it was used again."""

    gone_s: float  # until its engine counted as gone
    back_s: float  # from plugging in until the directory knew the engine again
    conversations: tuple[int, int]  # on its engine before the silence and after it
    used_s: float  # from `back_s` until a new conversation was placed on the engine


async def silenced(fleet: CabledFleet, host: str, engine: str) -> Silenced:
    """Pull all cables of a host until its engine counts as gone; plug them in and wait until it is used."""
    links = fleet.network.links_of(host)
    before = await fleet.conversations_on(engine)
    began = time.monotonic()
    for link in links:
        await asyncio.to_thread(fleet.network.pull, *link)
    await fleet.until_engines(len(BACKS) - 1)
    gone = time.monotonic()
    for link in links:
        await asyncio.to_thread(fleet.network.plug_in, *link)
    await fleet.until_engines(len(BACKS))
    back, again = time.monotonic(), await fleet.conversations_on(engine)
    async with asyncio.timeout(SETTLE_S):  # new conversations fill the other engine
        names = (f"after-the-silence-{number}" for number in itertools.count())
        while await new_conversation(fleet.url, next(names)) != engine:
            pass
    return Silenced(gone - began, back - gone, (before, again), time.monotonic() - back)


async def new_conversation(url: str, name: str) -> str | None:
    """Start a conversation, and return the name of its decoder."""
    async with aiohttp.ClientSession(url, headers={"authorization": "Bearer steady"}) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        asked = http.post("/v1/chat/completions", json=body, headers={"x-conversation-id": name})
        async with asked as answer:
            assert answer.status == 200, await answer.text()
        async with http.get(f"/v1/conversations/{name}") as answer:
            decoder: str | None = (await answer.json()).get("decoder")
            return decoder


async def play(seconds: float, folder: Path) -> dict[str, Any]:
    network = CabledNetwork(HEAD, *BACKS)
    for one, other in ((FRONT, HEAD), *((host, back) for host in (FRONT, HEAD) for back in BACKS)):
        network.connect(one, other)
    fleet = CabledFleet(network, folder)
    await fleet.start()
    clients = SteadyClients(fleet.url, MODEL)
    async with AsyncExitStack() as stack:
        asking = asyncio.create_task(clients.run())
        stack.callback(asking.cancel)
        if not await clients.all_answered():
            raise SystemExit("the fleet does not serve")
        rows = []
        for cable in ((FRONT, HEAD), (FRONT, BACKS[0]), (HEAD, BACKS[0])):
            for ways in WAYS:
                rows.append(await pulled(network, clients, cable, ways, seconds))
                print(rows[-1], file=sys.stderr, flush=True)
        decoders = await decoders_of(fleet.url, clients)
    await asyncio.gather(asking, return_exceptions=True)
    silent = await silenced(fleet, BACKS[0], "d0")
    return {
        "rows": [asdict(one) for one in rows],
        "decoders": decoders,
        "silenced": asdict(silent),
        "left": await fleet.left(),
        "ended": fleet.ended(),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(play(float(sys.argv[1]), Path(sys.argv[2]))), indent=1))
