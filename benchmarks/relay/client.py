"""A load generator that checks status, framing, order and number of tokens of every answer.

    python -m benchmarks.relay.client '{"port": 1, "connections": 64, "tokens": 40, "rate": 40, ...}'

If `tokens` is given, every connection requests one stream of so many tokens, and figures cover all streams.
Otherwise every connection repeats requests for `seconds`. The output is one line of JSON.
"""

import asyncio
import itertools
import json
import random
import re
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httptools
import uvloop

from benchmarks.harness.output import quantile

API_KEY = "sk-bench"
TOKEN = re.compile(rb'"content":\s*"t(\d+)"')
LATE_S = 0.5  # a stream is late if it ends later than this after its schedule: machines may be busy


@dataclass(frozen=True)
class Load:
    """Load of one run: the number of connections, and what each connection requests."""

    port: int
    connections: int
    tokens: int = 0  # of a stream; 0: whole answers
    rate: int = 0
    in_step: bool = False
    seconds: float = 1.0
    timeout_s: float = 30.0
    prompt_bytes: int = 512
    fresh: bool = False  # each request is the first of a conversation of its own
    tls: bool = False


@dataclass
class Tally:
    """Counts and times of the answers on all connections of a run."""

    requests: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    late_streams: int = 0
    first_token_s: list[float] = field(default_factory=list)
    delay_s: list[float] = field(default_factory=list)


class Asker(asyncio.Protocol):
    """A connection that sends requests and checks the answers."""

    def __init__(self, load: Load, tally: Tally, requests: Iterator[bytes], until: float) -> None:
        self._load = load
        self._tally = tally
        self._requests = requests
        self._until = until
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._ask()

    def _ask(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._tokens = 0
        self._last_stamp = 0
        self._rest = b""
        self._finished = self._saw_done = False
        self._asked_at = time.monotonic_ns()
        self._transport.write(next(self._requests))

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"framing: {error}")
            return
        if self._finished and not self.done.done():
            self._tally.requests += 1
            if self._load.tokens:
                self._end_stream()
            elif time.monotonic() < self._until:
                self._ask()
            else:
                self._end()

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._fail(f"status {self._parser.get_status_code()}")

    def on_body(self, data: bytes) -> None:
        if not self._load.tokens:
            return
        text = self._rest + data
        end = text.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = text
            return
        self._rest = text[end:]
        self._saw_done = self._saw_done or b"data: [DONE]" in text[:end]
        for stamp in TOKEN.findall(text, 0, end):
            sent = int(stamp)
            if self._tokens == 0:
                self._tally.first_token_s.append((self._now - self._asked_at) / 1e9)
            if sent < self._last_stamp:
                self._fail("tokens out of order")
            self._last_stamp = sent
            self._tokens += 1
            self._tally.delay_s.append((self._now - sent) / 1e9)

    def on_message_complete(self) -> None:
        self._finished = True

    def _end_stream(self) -> None:
        self._tally.tokens += self._tokens
        if self._tokens != self._load.tokens or not self._saw_done:
            self._fail(f"{self._tokens} of {self._load.tokens} tokens, [DONE]: {self._saw_done}")
        took = (self._now - self._asked_at) / 1e9
        if took > (self._load.tokens + 1) / self._load.rate + LATE_S:  # one period for the first step
            self._tally.late_streams += 1
        self._end()

    def _end(self) -> None:
        self._transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, why: str) -> None:
        self._tally.errors.append(why)
        self._transport.abort()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._fail("connection lost")


def requests_of(load: Load, number: int) -> Iterator[bytes]:
    """Yield the HTTP requests that connection `number` sends, one after another."""
    if load.fresh:
        run = random.randrange(1 << 30)
        return (request_of(load, f"{run}-{number}-{turn}") for turn in itertools.count())
    return itertools.repeat(request_of(load, str(number)))


def request_of(load: Load, conversation: str) -> bytes:
    plan = f"tokens={load.tokens} rate={load.rate or 1} step={int(load.in_step)} "
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": plan + "x" * load.prompt_bytes}],
            "max_tokens": max(load.tokens, 1),
            "stream": load.tokens > 0,
        }
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {API_KEY}\r\n"
        f"x-session-id: conversation-{conversation}\r\nx-smg-routing-key: conversation-{conversation}\r\n"
        f"accept: */*\r\nuser-agent: benchmark\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return (head + body).encode()


async def ask_all(load: Load) -> Tally:
    loop = asyncio.get_running_loop()
    tally = Tally()
    until = time.monotonic() + load.seconds
    context = ssl._create_unverified_context() if load.tls else None
    spread_s = 1.0 / load.rate if load.rate and not load.in_step else 0.0

    async def ask(number: int) -> None:
        await asyncio.sleep(random.random() * max(spread_s, load.connections / 5000))
        requests = requests_of(load, number)
        try:
            _, asker = await loop.create_connection(
                lambda: Asker(load, tally, requests, until), "127.0.0.1", load.port, ssl=context
            )
        except OSError as error:
            tally.errors.append(f"connect: {error}")
            return
        await asker.done

    tasks = [loop.create_task(ask(number)) for number in range(load.connections)]
    _, unfinished = await asyncio.wait(tasks, timeout=load.timeout_s)
    for task in unfinished:
        task.cancel()
        tally.errors.append("not finished in time")
        tally.late_streams += 1
    return tally


def main() -> None:
    load = Load(**json.loads(sys.argv[1]))
    began = time.monotonic()
    tally = uvloop.run(ask_all(load))
    found = {
        "seconds": time.monotonic() - began,
        "requests": tally.requests,
        "tokens": tally.tokens,
        "errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else None,
        "late_streams": tally.late_streams,
        "first_token_p50_s": quantile(tally.first_token_s, 0.5) if tally.first_token_s else None,
        "delay_p50_s": quantile(tally.delay_s, 0.5) if tally.delay_s else None,
        "delay_p99_s": quantile(tally.delay_s, 0.99) if tally.delay_s else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
