"""The directory runs on a full file system: a tmpfs that only its process sees."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from router.directory.api.messages import STATUS
from router.directory.api.rpc import Stub
from router.gateway.config import GatewayConfig, ServedModel
from router.gateway.main import Gateway
from tests.support.directory_process import DirectoryProcess
from tests.support.fake_engine import FakeEngine
from tests.support.fake_fleet import MODEL, GatewayAnswer, ask, get, user
from tests.support.waiting import until

ON_A_DISK_OF_ITS_OWN = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'


def namespace() -> list[str]:
    """Return a command prefix with separate mounts, for root or for a user with namespaces."""
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *options]
        if not subprocess.run([*command, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
            return command
    pytest.skip("this machine lets us mount nothing")


class SmallDisk:
    def __init__(self, folder: Path, directory: DirectoryProcess) -> None:
        self._address = directory.address
        self._filler = Path(f"/proc/{directory.pid}/root{folder}/filler")

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("wb", buffering=0) as opened:
            while opened.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        self._filler.unlink()

    async def problem(self) -> str:
        """Return what the directory's status says about its disk."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            return (await Stub(channel, "s3cret").ask(STATUS, None, 5.0)).journal_problem


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, SmallDisk]]:
    engine = FakeEngine("d0")
    await engine.start()
    directory = DirectoryProcess(folder, [engine.info])
    await directory.start(*namespace(), "sh", "-c", ON_A_DISK_OF_ITS_OWN, str(folder))
    config = GatewayConfig(
        directory=directory.address,
        models=(ServedModel(MODEL),),
        name="g0",
        port=0,
        directory_secret="s3cret",
        place_wait_s=30.0,
    )
    gateway = Gateway(config)
    try:
        url = f"http://127.0.0.1:{await gateway.start()}"
        await until(lambda: len(gateway.directory.engines))
        yield url, SmallDisk(folder, directory)
    finally:
        await gateway.stop(0.2)
        await directory.kill()
        await engine.stop()


async def talk(url: str, conversation: str) -> tuple[GatewayAnswer, float]:
    began = time.monotonic()
    answer = await ask(url, [user("hi")], headers={"x-conversation-id": conversation})
    return answer, time.monotonic() - began


async def test_a_full_disk_refuses_new_conversations_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (url, disk):
        assert (await talk(url, "bound"))[0].status == 200
        disk.fill()
        told = await asyncio.gather(*(talk(url, f"new-{number}") for number in range(3)))
        for answer, took_s in told:
            assert answer.status == 503 and took_s < 1.0
            reason = "the directory cannot write its journal: database or disk is full; free space"
            assert reason in answer.error["message"]
            assert "retry-after" in answer.headers
        assert (await talk(url, "bound"))[0].status == 200
        assert reason in await disk.problem()
        ended, why = await get(f"{url}/v1/conversations/bound", "DELETE")
        assert ended == 503 and "database or disk is full" in why["error"]["message"]
        disk.make_room()
        assert (await talk(url, "new-0"))[0].status == 200
        assert not await disk.problem()
