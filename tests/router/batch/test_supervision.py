"""The gateways' actor restarts a killed batch process, and the next actor adopts it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.fleet.load import parse_fleet
from deploy.home import FleetHome, FleetKeys
from deploy.ray.common import SealedFleet
from deploy.ray.gateway_actor import GatewaysActor
from tests.router.batch.processes import free_port
from tests.support.waiting import until
from workers.keeper.process_lease import RECORD, ProcessRecord
from workers.processes import alive

FLEET = """
policy: collocated
tiers: [{name: all, role: mixed, replicas: 1}]
gateway: {port: %d, processes: 1}
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[FleetHome]:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the token of its cluster")
    with tempfile.TemporaryDirectory(prefix="cs-") as short:  # the paths of sockets are limited in length
        yield FleetHome(Path(short))
        for process in psutil.process_iter(["cmdline"]):
            if short in " ".join(process.info["cmdline"] or ()):
                process.kill()


async def answering(pid: int, url: str, not_this: int = 0) -> int:
    """Wait until a child of process `pid`, other than `not_this`, answers at `url`; return its pid."""
    async with httpx.AsyncClient() as http, asyncio.timeout(60):
        while True:
            try:
                children = [child.pid for child in psutil.Process(pid).children()]
                if children and children[0] != not_this and (await http.get(url)).status_code == 200:
                    return children[0]
            except (httpx.TransportError, psutil.NoSuchProcess):
                pass
            await asyncio.sleep(0.1)


def keep(root: str, port: int, directory: str) -> GatewaysActor:
    fleet, home = parse_fleet(FLEET % port, "fleet.yaml"), FleetHome(Path(root))
    return GatewaysActor(SealedFleet.of(fleet, FleetKeys.here(home.name)), home, directory)


@pytest.mark.slow
async def test_a_killed_batch_process_is_restarted_and_adopted_by_the_next_actor(home: FleetHome) -> None:
    arguments = (str(home.root), free_port(), f"127.0.0.1:{free_port()}")  # no directory is needed
    load = "import time; from tests.router.batch.test_supervision import keep"
    code = f"{load}; actor = keep(*{arguments!r}); time.sleep(300)"
    actor = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", code])
    files = home.gateways / "batch"
    await until((files / RECORD).exists, 60)
    url = f"http://127.0.0.1:{json.loads((files / 'config.json').read_text())['port']}/metrics"
    record = ProcessRecord.read(files / RECORD)
    assert record is not None
    first = await answering(record.pid, url)
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: (now := ProcessRecord.read(files / RECORD)) is not None and now != record, 60)
    record = ProcessRecord.read(files / RECORD)
    assert record is not None
    again = await answering(record.pid, url, first)
    print(f"back after {time.monotonic() - killed:.1f} s")
    actor.kill()
    await asyncio.to_thread(actor.wait, 10)
    heir = keep(*arguments)  # as Ray restarts it
    await until(lambda: len(heir.pids()) == 2, 60)
    assert heir.pids()["batch"] == record.pid and await answering(record.pid, url) == again
    heir.end()
    assert not alive(again)


@pytest.mark.slow
async def test_gateways_learn_the_new_port_of_a_batch_process_whose_port_was_taken(
    home: FleetHome,
) -> None:
    actor = keep(str(home.root), free_port(), f"127.0.0.1:{free_port()}")
    files = home.gateways / "batch"
    await until((files / RECORD).exists, 60)
    file = files / "config.json"
    port, number = json.loads(file.read_text())["port"], file.stat().st_ino
    record = ProcessRecord.read(files / RECORD)
    assert record is not None
    await answering(record.pid, f"http://127.0.0.1:{port}/metrics")
    for process in (*psutil.Process(record.pid).children(), psutil.Process(record.pid)):
        process.kill()
    with socket.socket() as somebody:
        somebody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        async with asyncio.timeout(10):
            while True:
                try:
                    somebody.bind(("127.0.0.1", port))
                    break
                except OSError:
                    await asyncio.sleep(0.01)
        somebody.listen()
        await until(lambda: json.loads(file.read_text())["port"] != port, 60)
        renewed = json.loads(file.read_text())["port"]
        assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_ino != number
        await until(lambda: actor.pids()["batch"] != record.pid, 60)
        await answering(actor.pids()["batch"], f"http://127.0.0.1:{renewed}/metrics")

        def told() -> bool:
            texts = [one.read_text() for one in home.gateways.glob("gateway-0*/config.json")]
            return f"127.0.0.1:{renewed}" in {json.loads(text)["batch"]["http"] for text in texts}

        await until(told, 60)
    actor.end()
