"""A tenant that does all it can to slow down another one. A process of its own: `attack`."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from multiprocessing.queues import Queue
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from traces.replay.client import text

FLOODERS, GIANTS, CANCELLERS, SLOW, BATCHERS = 32, 6, 12, 20, 4
DEAR = 2  # of each kind of requests that would cost more than they weigh
FLOOD_TOKENS, GIANT_CHARACTERS = 128, 80_000
LONG_CHARACTERS, LONG_ID = 10 << 20, "R" * 60_000
LINES = 50  # of a batch
PAUSE_S = 0.1  # after a refusal: `retry-after` is not kept to
SLOW_BYTE_S = 1.0
GIVES_UP_S = 60.0


class HostileTenant:
    def __init__(self, url: str, key: str, model: str, seed: int) -> None:
        self._url, self._model, self._random = url, model, Random(seed)
        self._headers = {"authorization": f"Bearer {key}"}
        self._numbers = count()
        self.answers: Counter[str] = Counter()

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(GIVES_UP_S), connector=connector
        ) as session:
            kinds: list[tuple[int, Callable[[aiohttp.ClientSession], Awaitable[str]]]] = [
                (FLOODERS, self._flood),
                (GIANTS, self._giant),
                (CANCELLERS, self._cancel),
                (BATCHERS, self._batch),
                (SLOW, self._slow),
                (DEAR, self._cut),
                (DEAR, self._tokenize),
                (DEAR, self._named),
                (DEAR, self._urgent),
                (DEAR, self._beam),
                (DEAR, self._dear_batch),
            ]
            async with asyncio.TaskGroup() as group:
                for number, kind in kinds:
                    for _ in range(number):
                        group.create_task(self._forever(session, kind))

    async def _forever(
        self, session: aiohttp.ClientSession, kind: Callable[[aiohttp.ClientSession], Awaitable[str]]
    ) -> None:
        while True:
            try:
                said = await kind(session)
            except (aiohttp.ClientError, OSError, TimeoutError) as wrong:
                said = type(wrong).__name__
            self.answers[f"{kind.__name__.removeprefix('_')} {said}"] += 1
            if said != "200":
                await asyncio.sleep(PAUSE_S)

    def _body(self, characters: int, tokens: int, **more: Any) -> dict[str, Any]:
        said = text(f"hostile-{self._random.random()}-{next(self._numbers)}", characters)
        sizes = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        return {"model": self._model, "messages": [{"role": "user", "content": said}], **sizes, **more}

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        body: dict[str, Any],
        read: int = -1,
        path: str = "/v1/chat/completions",
        **headers: str,
    ) -> str:
        said = {name.replace("_", "-"): value for name, value in headers.items()}
        async with session.post(f"{self._url}{path}", json=body, headers=said) as answer:
            await answer.content.read(read)
            return str(answer.status)

    async def _flood(self, session: aiohttp.ClientSession) -> str:
        return await self._ask(session, self._body(400, FLOOD_TOKENS, stream=True))

    async def _giant(self, session: aiohttp.ClientSession) -> str:
        return await self._ask(session, self._body(GIANT_CHARACTERS, 1))

    async def _cancel(self, session: aiohttp.ClientSession) -> str:
        """Its first bytes are read, and the connection is closed."""
        return await self._ask(session, self._body(4000, FLOOD_TOKENS, stream=True), read=16)

    async def _cut(self, session: aiohttp.ClientSession) -> str:
        """Text that an engine would tokenise to cut it."""
        return await self._ask(session, self._body(LONG_CHARACTERS, 1, truncate_prompt_tokens=10))

    async def _tokenize(self, session: aiohttp.ClientSession) -> str:
        body = {"model": self._model, "prompt": text("long", LONG_CHARACTERS)}
        return await self._ask(session, body, path="/tokenize")

    async def _named(self, session: aiohttp.ClientSession) -> str:
        """Under an id that would stand in every event of its stream."""
        return await self._ask(session, self._body(400, FLOOD_TOKENS, stream=True), x_request_id=LONG_ID)

    async def _urgent(self, session: aiohttp.ClientSession) -> str:
        body = self._body(10_000, 1)
        return await self._ask(session, body, x_conversation_priority="10")

    async def _beam(self, session: aiohttp.ClientSession) -> str:
        return await self._ask(session, self._body(400, FLOOD_TOKENS, use_beam_search=True, n=8))

    async def _batch(self, session: aiohttp.ClientSession) -> str:
        return await self._submit(session, LINES, 2000)

    async def _dear_batch(self, session: aiohttp.ClientSession) -> str:
        return await self._submit(session, 1, LONG_CHARACTERS)

    async def _submit(self, session: aiohttp.ClientSession, count: int, characters: int) -> str:
        lines = "\n".join(
            json.dumps({
                "custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions",
                "body": self._body(characters, 64),
            })
            for number in range(count)
        )  # fmt: skip
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines, filename="in.jsonl")
        async with session.post(f"{self._url}/v1/files", data=form) as answer:
            if answer.status != 200:
                return str(answer.status)
            file = (await answer.json())["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with session.post(f"{self._url}/v1/batches", json=asked) as answer:
            return str(answer.status)

    async def _slow(self, session: aiohttp.ClientSession) -> str:
        """A body that comes byte by byte."""
        where = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            fields = {"host": where.netloc, "content-type": "application/json", "content-length": "100000"}
            head = "".join(f"{name}: {value}\r\n" for name, value in {**self._headers, **fields}.items())
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode())
            answer = asyncio.create_task(reader.readline())
            while not answer.done():
                writer.write(b" ")
                await writer.drain()
                await asyncio.wait([answer], timeout=SLOW_BYTE_S)
            line = answer.result().split()
            return line[1].decode() if len(line) > 1 else "cut"
        finally:
            writer.close()


def attack(url: str, key: str, model: str, seed: int, seconds: float, results: "Queue[Counter[str]]") -> None:
    """For so long. It leaves the processors to the fleet: on other machines it would have its own."""
    os.nice(19)
    attacking = HostileTenant(url, key, model, seed)

    async def for_a_while() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await attacking.run()

    asyncio.run(for_a_while())
    results.put(attacking.answers)
