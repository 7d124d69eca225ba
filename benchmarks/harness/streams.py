"""Streamed answers and made-up prompts."""

import json
from collections.abc import AsyncIterator, Mapping
from random import Random
from typing import Any

import httpx


def words(random: Random, count: int) -> str:
    """Return random words of four hexadecimal digits: five tokens each where a byte is a token."""
    return " ".join(f"{random.randrange(16**4):04x}" for _ in range(count))


async def events(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[Any]:
    """Send a request and yield the events of its stream; an HTTP error is raised."""
    request = {**body, "stream": True, "temperature": 0.0}
    async with http.stream("POST", path, json=request, headers=dict(headers)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])
