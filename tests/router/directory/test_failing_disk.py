"""A directory refuses new conversations while its disk is full (a small tmpfs) or fails to sync."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from router.directory.api.messages import STATUS
from router.directory.api.rpc import Stub
from router.gateway.config import GatewayConfig, ServedModel
from router.gateway.main import Gateway
from tests.support.directory_process import DirectoryProcess
from tests.support.failing_sync import FailingSync
from tests.support.fake_engine import FakeEngine
from tests.support.fake_fleet import MODEL, GatewayAnswer, ask, get, user
from tests.support.small_disk import small_disk
from tests.support.waiting import until


async def problem(directory: DirectoryProcess) -> str:
    """Return the problem with its disk that the directory's status states."""
    async with grpc.aio.insecure_channel(directory.address) as channel:
        return (await Stub(channel, "s3cret").ask(STATUS, None, 5.0)).journal_problem


@asynccontextmanager
async def serving(folder: Path, within: list[str]) -> AsyncIterator[tuple[str, DirectoryProcess]]:
    engine = FakeEngine("d0")
    await engine.start()
    directory = DirectoryProcess(folder, [engine.info])
    try:
        await directory.start(*within)
        async with gateway_of(directory) as url:
            yield url, directory
    finally:
        await directory.kill()
        await engine.stop()


@asynccontextmanager
async def gateway_of(directory: DirectoryProcess) -> AsyncIterator[str]:
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
        yield url
    finally:
        await gateway.stop(0.2)


async def talk(url: str, conversation: str) -> tuple[GatewayAnswer, float]:
    began = time.monotonic()
    answer = await ask(url, [user("hi")], headers={"x-conversation-id": conversation})
    return answer, time.monotonic() - began


async def test_a_directory_with_a_full_disk_refuses_new_conversations_immediately(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        async with serving(tmp_path, disk.within) as (url, directory):
            assert (await talk(url, "bound"))[0].status == 200
            disk.fill()
            told = await asyncio.gather(*(talk(url, f"new-{number}") for number in range(3)))
            for answer, took_s in told:
                assert answer.status == 503 and took_s < 1.0
                reason = "the directory cannot write its journal: database or disk is full; free space"
                assert reason in answer.error["message"]
                assert "retry-after" in answer.headers
            assert (await talk(url, "bound"))[0].status == 200
            assert reason in await problem(directory)
            ended, why = await get(f"{url}/v1/conversations/bound", "DELETE")
            assert ended == 503 and "database or disk is full" in why["error"]["message"]
            disk.make_room()
            assert (await talk(url, "new-0"))[0].status == 200
            assert not await problem(directory)


async def test_a_directory_started_on_a_full_disk_knows_the_conversations_of_its_journal(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path) as disk:
        async with serving(tmp_path, disk.within) as (url, directory):
            assert (await talk(url, "bound"))[0].status == 200
            disk.fill()
            await directory.kill()
            await directory.start(*disk.within)
            disk.fill()  # the start has shortened SQLite's log
            answer, _ = await talk(url, "new")
            assert answer.status == 503 and "free space or fix the disk" in answer.error["message"]
            assert (await get(f"{url}/v1/conversations/bound"))[0] == 200
            assert (await talk(url, "bound"))[0].status == 200
            disk.make_room()
            assert (await talk(url, "new"))[0].status == 200


async def test_a_directory_whose_disk_fails_to_sync_loses_no_bound_conversation(tmp_path: Path) -> None:
    sync = FailingSync(tmp_path)
    async with serving(tmp_path, sync.within) as (url, directory):
        assert (await talk(url, "bound"))[0].status == 200
        sync.fail()
        answer, took_s = await talk(url, "new")
        assert answer.status == 503 and took_s < 1.0
        assert "cannot write its journal: disk I/O error" in answer.error["message"]
        assert (await talk(url, "bound"))[0].status == 200
        assert "disk I/O error" in await problem(directory)
        await directory.kill()
        await directory.start(*sync.within)
        assert (await get(f"{url}/v1/conversations/bound"))[0] == 200
        assert (await talk(url, "new"))[0].status == 503
        sync.work()
        assert (await talk(url, "new"))[0].status == 200
        await directory.kill()
        await directory.start(*sync.within)
        for conversation in ("bound", "new"):
            assert (await get(f"{url}/v1/conversations/{conversation}"))[0] == 200
