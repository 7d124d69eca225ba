"""A key's limits bound the stored bytes and open batches of its owner, and of no other owner."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import openai
import pytest

from router.auth.keyring import Keyring
from router.auth.keys import Limits
from router.batch.config import DispatchSettings
from tests.router.batch.gateway import GatewayWithBatch, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, submit, upload

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
async def idle(either_url: str, files: Path) -> AsyncIterator[GatewayWithBatch]:
    """Start a gateway with a batch process but no engine, so that batches do not end."""
    gateway = GatewayWithBatch(either_url, str(files), StaticFleet(), DispatchSettings(tick_s=0.02))
    await gateway.start()
    gateway.front.keys = Keyring((), None, Limits(stored_gib=3 / 1024, batches=2))
    yield gateway
    await gateway.stop()


async def test_files_count_against_the_quota_of_a_key(idle: GatewayWithBatch, files: Path) -> None:
    async with idle.client("sk-one") as one, idle.client("sk-two") as two:
        first = await upload(one, b"x" * 2 * MIB)
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await upload(one, b"x" * 2 * MIB)
        assert refused.value.code == "stored_bytes_exceeded"
        assert [file.id for file in (await one.files.list()).data] == [first.id]
        assert os.listdir(files) == [first.id]
        await upload(one, b"x" * MIB)
        await upload(two, b"x" * 2 * MIB)
        await one.files.delete(first.id)
        await upload(one, b"x" * 2 * MIB)


async def test_uploads_in_progress_count_against_the_quota_of_a_key(idle: GatewayWithBatch) -> None:
    host, _, port = idle.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port.partition("/")[0]))
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-one\r\n"
        f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {3 * MIB}\r\n\r\n--b\r\n"
    )
    writer.write(head.encode())
    async with idle.client("sk-one") as one, idle.client("sk-two") as two:
        await refused_upload(one)
        await upload(two, b"x" * MIB)
        writer.close()
        async with asyncio.timeout(10):
            while True:
                with suppress(openai.PermissionDeniedError):
                    await upload(one, b"x" * MIB)
                    break
                await asyncio.sleep(0.05)


async def refused_upload(client: openai.AsyncOpenAI) -> None:
    async with asyncio.timeout(10):
        while True:  # until the other upload has begun
            try:
                file = await upload(client, b"x" * 1000)
            except openai.PermissionDeniedError as refused:
                assert refused.code == "stored_bytes_exceeded"
                return
            await client.files.delete(file.id)


async def test_a_path_with_an_extra_slash_is_not_found(idle: GatewayWithBatch) -> None:
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": "Bearer sk-one"}
        async with session.get(f"{idle.url}/v1/files/", headers=headers, allow_redirects=False) as answer:
            assert answer.status in (404, 405) and "location" not in answer.headers


async def test_an_owner_can_have_only_a_limited_number_of_open_batches(idle: GatewayWithBatch) -> None:
    async with idle.client("sk-one") as one, idle.client("sk-two") as two:
        made = [await submit(one, jsonl([line("a")])) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await submit(one, jsonl([line("a")]))
        assert refused.value.code == "too_many_batches"
        await submit(two, jsonl([line("a")]))
        await one.batches.cancel(made[0].id)
        assert (await ended(one, made[0])).status == "cancelled"
        await submit(one, jsonl([line("a")]))
