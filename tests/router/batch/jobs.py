"""Makes input files for the tests, and waits for batches through the SDK."""

import asyncio
import json
import time
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch, FileObject

from tests.router.batch.fake_engine import MODEL

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, content: str | None = None, **changes: Any) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": custom_id if content is None else content}],
        "max_tokens": 8,
    }
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in lines)


async def upload(client: AsyncOpenAI, data: bytes, name: str = "in.jsonl") -> FileObject:
    return await client.files.create(file=(name, data), purpose="batch")


async def submit(
    client: AsyncOpenAI, data: bytes, endpoint: Any = "/v1/chat/completions", **more: Any
) -> Batch:
    file = await upload(client, data)
    more = {"completion_window": "24h", **more}
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)


async def in_progress(client: AsyncOpenAI, batch: Batch, done: int = 0) -> None:
    """Wait until a batch runs and has at least `done` results."""
    async with asyncio.timeout(60):
        while True:
            now = await client.batches.retrieve(batch.id)
            if now.status == "in_progress" and now.request_counts and now.request_counts.completed >= done:
                return
            await asyncio.sleep(0.02)


async def ended(client: AsyncOpenAI, batch: Batch, within_s: float = 90.0) -> Batch:
    until = time.monotonic() + within_s
    while True:
        batch = await client.batches.retrieve(batch.id)
        if batch.status in ENDED:
            return batch
        assert time.monotonic() < until, f"still {batch.status} after {within_s} s: {batch.request_counts}"
        await asyncio.sleep(0.05)


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]
