"""A fake engine that costs little: events in the shape of vLLM's, on a schedule, straight from a protocol.

What it is to do stands in the first message, so that every router passes it on untouched:
``tokens=40 rate=40 step=1``. With ``step`` all streams of one rate advance together, as in a decode batch.
Each token carries the time it was sent at (CLOCK_MONOTONIC, nanoseconds). To a gateway that asks for them it
says its tokens, as a fleet's engines do (workers/answer_middleware.py).
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable

import httptools
import uvloop

PLAN = re.compile(rb"tokens=(\d+) rate=(\d+) step=(\d)")
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":"t%020d"},"logprobs":null,"finish_reason":null,'
    b'"token_ids":null}]}\n\n'
)
LAST = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","token_ids":null}]}\n\n'
    b"data: [DONE]\n\n"
)
WHOLE = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"m","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"hello"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":8,"total_tokens":9,"completion_tokens":1}}'
)
ABOUT = b'{"object":"list","data":[{"id":"m","object":"model"}],"status":"ok","model_path":"m"}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunks(line: bytes) -> tuple[bytes, bytes]:
    """A token's, with its time to fill in, and the last ones."""
    token = b"%x\r\n" % len(line + EVENT % 0) + line + EVENT + b"\r\n"
    return token, chunk((line and b":\n") + LAST) + b"0\r\n\r\n"


ASKED = b"x-stream-pieces"
BARE, LINED = chunks(b""), chunks(b":123456;\n")
LINED_HEAD = STREAM_HEAD.replace(b"server: fake", ASKED + b": 0")


class Steps:
    """Ticks of one rate, shared by all streams that advance in step."""

    def __init__(self, rate: int) -> None:
        self._period = 1.0 / rate
        self._loop = asyncio.get_running_loop()
        self.streams: dict[EngineStream, None] = {}
        self._due = 0.0

    def join(self, stream: EngineStream) -> None:
        if not self.streams:
            self._due = self._loop.time() + self._period
            self._loop.call_at(self._due, self._tick)
        self.streams[stream] = None

    def _tick(self) -> None:
        for stream in list(self.streams):
            if not stream.step():
                self.streams.pop(stream, None)
        if self.streams:
            self._due = max(self._due + self._period, self._loop.time())
            self._loop.call_at(self._due, self._tick)


class EngineStream:
    def __init__(self, transport: asyncio.Transport, tokens: int, *, lined: bool) -> None:
        self._transport = transport
        self._token, self._end = LINED if lined else BARE
        self._left = tokens

    def step(self) -> bool:
        """Send the next token; False when it was the last, or nobody listens any more."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        event = self._token % time.monotonic_ns()
        if self._left:
            self._transport.write(event)
            return True
        self._transport.write(event + self._end)
        return False

    def run_alone(self, period: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()

        def tick() -> None:
            nonlocal due
            if self.step():
                due += period
                loop.call_at(due, tick)

        tick()


class StreamingEngine(asyncio.Protocol):
    def __init__(self, steps: Callable[[int], Steps]) -> None:
        self._steps = steps

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._lined = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lined = self._lined or name.lower() == ASKED

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        lined, self._lined = self._lined, False
        plan = PLAN.search(body)
        if plan is None or int(plan[1]) == 0:
            answer = WHOLE if body else ABOUT
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(answer), answer)
            )
            return
        tokens, rate, in_step = (int(group) for group in plan.groups())
        self._transport.write(LINED_HEAD if lined else STREAM_HEAD)
        stream = EngineStream(self._transport, tokens, lined=lined)
        if in_step:
            self._steps(rate).join(stream)
        else:
            stream.run_alone(1.0 / rate)


async def serve(port: int) -> None:
    steps: dict[int, Steps] = {}

    def of_rate(rate: int) -> Steps:
        if rate not in steps:
            steps[rate] = Steps(rate)
        return steps[rate]

    server = await asyncio.get_running_loop().create_server(
        lambda: StreamingEngine(of_rate), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
