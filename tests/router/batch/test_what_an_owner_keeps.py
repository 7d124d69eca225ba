"""Bytes of files and unended batches of one owner are bounded, by what its key says; others' are not."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from router.batch.config import DispatchSettings
from router.keys import Keys, Limits
from tests.router.batch.gateway import Gateway, StaticFleet
from tests.router.batch.jobs import ended, jsonl, line, submit, upload

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "files"


@pytest.fixture
async def idle(either_url: str, files: Path) -> AsyncIterator[Gateway]:
    """No engine: batches stay."""
    gateway = Gateway(either_url, str(files), StaticFleet(), DispatchSettings(tick_s=0.02))
    await gateway.start()
    gateway.front.keys = Keys((), None, Limits(stored_gib=3 / 1024, batches=2))
    yield gateway
    await gateway.stop()


async def test_files_fill_what_the_key_may_store(idle: Gateway, files: Path) -> None:
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


async def test_batches_that_have_not_ended_are_bounded(idle: Gateway) -> None:
    async with idle.client("sk-one") as one, idle.client("sk-two") as two:
        made = [await submit(one, jsonl([line("a")])) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            await submit(one, jsonl([line("a")]))
        assert refused.value.code == "too_many_batches"
        await submit(two, jsonl([line("a")]))
        await one.batches.cancel(made[0].id)
        assert (await ended(one, made[0])).status == "cancelled"
        await submit(one, jsonl([line("a")]))
