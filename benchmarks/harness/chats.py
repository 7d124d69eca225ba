"""Helps benchmarks' clients to play conversations, read streams, and make prompts and batch files."""

import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from random import Random
from typing import Any

import httpx

from traces.replay.client import ChatClient, Message, TimedAnswer

BATCH_ENDED = ("completed", "failed", "expired", "cancelled")


def words(random: Random, count: int) -> str:
    """Return random words of four hexadecimal digits; a byte-level tokenizer makes five tokens of each."""
    return " ".join(f"{random.randrange(16**4):04x}" for _ in range(count))


async def converse(
    chat: ChatClient, contents: Iterable[str], tokens: int, name: str = ""
) -> AsyncIterator[tuple[float, TimedAnswer]]:
    """Send a conversation's user messages one by one; yield the time of each request, and its answer."""
    messages: list[Message] = []
    for content in contents:
        messages.append({"role": "user", "content": content})
        asked = time.monotonic()
        answer = await chat.ask(messages, tokens, name)
        yield asked, answer
        messages.append({"role": "assistant", "content": answer.text})


async def events(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[Any]:
    """Send a request and yield the events of its stream; raise an error for a failed status."""
    request = {**body, "stream": True, "temperature": 0.0}
    async with http.stream("POST", path, json=request, headers=dict(headers)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def batch_file(endpoint: str, bodies: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the input file of a batch; its lines have the ids 0, 1 and so on."""
    lines = (
        json.dumps({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})
        for number, body in enumerate(bodies)
    )
    return "\n".join(lines).encode()
