"""Serves a cheap fake engine, which sends events like vLLM's on a schedule.

    python -m benchmarks.relay.engine PORT

The first message says what to do (`tokens=40 rate=40 step=1`), because every router passes messages on. With
`step`, all streams of one rate advance together, as in a decode batch. Each token carries its time of sending
(CLOCK_MONOTONIC, nanoseconds). A gateway that asks for token ids gets them as a fleet's engines send them
(workers/engine/resume/token_lines.py).
"""

import asyncio
import re
import sys
import time

import httptools
import uvloop

PLAN = re.compile(rb"tokens=(\d+) rate=(\d+) step=(\d)")
ASKS_FOR_LINES = b"x-stream-pieces"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
LINED_HEAD = STREAM_HEAD.replace(b"server: fake", ASKS_FOR_LINES + b": 0")
CHUNK_BEGIN = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":'
)
EVENT = CHUNK_BEGIN + b'{"content":"t%020d"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
LAST = CHUNK_BEGIN + b'{},"logprobs":null,"finish_reason":"stop","token_ids":null}]}\n\ndata: [DONE]\n\n'
WHOLE = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"m","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"hello"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":8,"total_tokens":9,"completion_tokens":1}}'
)
ABOUT = b'{"object":"list","data":[{"id":"m","object":"model"}],"status":"ok","model_path":"m"}'


def chunks(line: bytes) -> tuple[bytes, bytes]:
    """Return the HTTP chunk of one token, with a place for its time, and the chunks that end a stream."""
    token = b"%x\r\n" % len(line + EVENT % 0) + line + EVENT + b"\r\n"
    last = (line and b":\n") + LAST
    return token, b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)


BARE, LINED = chunks(b""), chunks(b":123456;\n")


class EngineStream:
    """Stream of one answer, sent token by token."""

    def __init__(self, transport: asyncio.Transport, tokens: int, *, lined: bool) -> None:
        self._transport = transport
        self._token, self._end = LINED if lined else BARE
        self._left = tokens

    def step(self) -> bool:
        """Send the next token; return False if it was the last token or the client has left."""
        if self._transport.is_closing():
            return False
        self._left -= 1
        event = self._token % time.monotonic_ns()
        self._transport.write(event if self._left else event + self._end)
        return self._left > 0


class Steps:
    """Timer with one rate; at each tick, each stream that has joined sends a token."""

    def __init__(self, rate: int, *, shared: bool) -> None:
        self._period = 1.0 / rate
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._streams: dict[EngineStream, None] = {}
        self._due = 0.0

    def join(self, stream: EngineStream) -> None:
        """Let a stream send tokens from the next tick on, or immediately if it has the timer for itself."""
        if not self._streams:
            self._due = self._loop.time() + (self._period if self._shared else 0.0)
            self._loop.call_at(self._due, self._tick)
        self._streams[stream] = None

    def _tick(self) -> None:
        for stream in list(self._streams):
            if not stream.step():
                self._streams.pop(stream, None)
        if self._streams:
            self._due += self._period
            if self._shared:  # a single stream catches up instead
                self._due = max(self._due, self._loop.time())
            self._loop.call_at(self._due, self._tick)


class StreamingEngine(asyncio.Protocol):
    """Server side of one connection to the fake engine."""

    def __init__(self, shared: dict[int, Steps]) -> None:
        self._shared = shared

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._lined = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lined = self._lined or name.lower() == ASKS_FOR_LINES

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        lined, self._lined = self._lined, False
        plan = PLAN.search(body)
        tokens, rate, in_step = (int(group) for group in plan.groups()) if plan else (0, 0, 0)
        if not tokens:
            answer = WHOLE if body else ABOUT
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            self._transport.write(head % len(answer) + answer)
            return
        self._transport.write(LINED_HEAD if lined else STREAM_HEAD)
        steps = self._steps(rate) if in_step else Steps(rate, shared=False)
        steps.join(EngineStream(self._transport, tokens, lined=lined))

    def _steps(self, rate: int) -> Steps:
        if rate not in self._shared:
            self._shared[rate] = Steps(rate, shared=True)
        return self._shared[rate]


async def serve(port: int) -> None:
    shared: dict[int, Steps] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: StreamingEngine(shared), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
