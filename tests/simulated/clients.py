"""Clients of the fleet: agents that hold conversations through its gateways, and disconnect at random."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulated.engines import MODEL
from tests.simulated.processes import GATEWAY_PORT

PATIENCE_S = 120.0  # far longer than a gateway may take


@dataclass
class Answer:
    """Outcome of one request: its status (0 if the connection broke), and the seconds until its end."""

    status: int
    seconds: float
    body: bytes = b""
    whole: bool = False  # the body is as long as its head says


class SimulatedAgent:
    """Agent with one conversation: some turns, each through one of the gateways, and maybe a DELETE."""

    def __init__(
        self, key: str, conversation: str, gateways: list[str], draw: Random, done: Callable[[Answer], None]
    ) -> None:
        self._key, self._conversation, self._gateways = key, conversation, gateways
        self._draw, self._done = draw, done
        self._roams = draw.choice((0.2, 0.9))  # share of requests that go to any gateway, not to `_home`
        self._messages: list[dict[str, str]] = []
        self._home = draw.choice(gateways)

    async def run(self, turns: int, until: float) -> None:
        loop, draw = asyncio.get_running_loop(), self._draw
        self._messages.append({"role": "user", "content": "x" * draw.randrange(20, 4000)})
        for number in range(turns):
            await self._turn()
            if loop.time() > until:
                break
            self._messages.append({"role": "assistant", "content": "w"})
            self._messages.append({"role": "user", "content": "y" * draw.randrange(10, 400)})
            if number < turns - 1:
                await asyncio.sleep(draw.expovariate(0.7))
        if draw.random() < 0.3:
            await request(self._gateway(), "DELETE", f"/v1/conversations/{self._conversation}", self._key)

    async def _turn(self) -> None:
        draw = self._draw
        tokens = draw.randrange(2, 40) if draw.random() < 0.8 else draw.randrange(100, 250)
        body = {"model": MODEL, "messages": self._messages, "max_tokens": tokens}
        if draw.random() < 0.5:
            body["stream"] = True
        asking = [asyncio.create_task(self._ask(body)) for _ in range(2 if draw.random() < 0.05 else 1)]
        if draw.random() < 0.07:  # the client leaves
            await asyncio.wait(asking, timeout=draw.expovariate(2.0))
            for one in asking:
                one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, body: dict[str, object]) -> None:
        headers = {"x-conversation-id": self._conversation, "content-type": "application/json"}
        for attempt in range(3):
            path, content = "/v1/chat/completions", json.dumps(body).encode()
            answer = await request(self._gateway(), "POST", path, self._key, headers, content)
            self._done(answer)
            if answer.status == 200 or attempt == 2:
                return
            await asyncio.sleep(self._draw.uniform(0.1, 2.0))

    def _gateway(self) -> str:
        return self._draw.choice(self._gateways) if self._draw.random() < self._roams else self._home


async def exceed_limits(
    key: str, gateways: list[str], draw: Random, until: float, done: Callable[[Answer], None]
) -> None:
    """Send more requests than a key's limits allow, through all gateways. Each begins a conversation."""
    loop = asyncio.get_running_loop()
    asking: list[asyncio.Task[Answer]] = []
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    path, content = "/v1/chat/completions", json.dumps(body).encode()
    while loop.time() < until:
        await asyncio.sleep(draw.expovariate(5.0))
        headers = {"x-conversation-id": f"m{len(asking)}", "content-type": "application/json"}
        gateway = draw.choice(gateways)
        asking.append(asyncio.create_task(request(gateway, "POST", path, key, headers, content)))
    for answer in await asyncio.gather(*asking):
        done(answer)


async def request(
    host: str, method: str, path: str, key: str, headers: dict[str, str] | None = None, body: bytes = b""
) -> Answer:
    """Send one request on its own connection, and read the answer to its end."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    lines = [f"{method} {path} HTTP/1.1", "host: g", f"authorization: Bearer {key}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"content-length: {len(body)}", "", ""]
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, GATEWAY_PORT)
            try:
                writer.write("\r\n".join(lines).encode() + body)
                answer = await reader.read()
            finally:
                writer.transport.abort()
    except OSError:  # also the end of our patience
        pass
    status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
    head, _, content = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    whole = length is not None and len(content) == int(length[1])
    return Answer(status, loop.time() - began, content, whole)
