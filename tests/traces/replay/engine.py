"""A small HTTP server that behaves like vLLM's chat endpoint with exactly known timing."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

CHARS_PER_TOKEN = 4.0
OPENING = 7  # tokens the "template" adds to any prompt


@dataclass
class PlayedRequest:
    at: float
    body: dict[str, Any]
    headers: dict[str, str]
    prompt_tokens: int
    new_tokens: int
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass
class PlayedEngine:
    """Endpoint with a TTFT of `fixed_s` plus `per_token_s` per uncached token, and a TBT of `step_s`."""

    fixed_s: float = 0.01
    per_token_s: float = 0.00004
    step_s: float = 0.006
    tokenize: bool = True
    refuse: list[tuple[int, str]] = field(default_factory=list)  # (status, Retry-After) to answer next
    cut_after: int | None = None  # tokens after which the connection is dropped
    error_event: bool = False
    end_after: int | None = None  # tokens after which the stream ends properly, but without a finish reason
    seen: list[PlayedRequest] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    metrics: str = "# TYPE conserve_transfers_total counter\nconserve_transfers_total 3\n"
    url: str = ""
    cache: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["PlayedEngine"]:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.tokenize:
            app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @property
    def played(self) -> list[PlayedRequest]:
        """Return the requests of the replay itself, without those of calibration and probes."""
        return [seen for seen in self.seen if "calibration" not in seen.headers.get("purpose", "")]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"count": tokens(render((await request.json())["messages"]))})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        now = time.monotonic()
        if self.refuse:
            status, retry_after = self.refuse.pop(0)
            return web.Response(status=status, headers={"Retry-After": retry_after}, text="full")
        prompt = render(body["messages"])
        known = max((shared(prompt, old) for old in self.cache), default=0)
        count = tokens(prompt)
        new = max(1, count - int(known / CHARS_PER_TOKEN))
        seen = PlayedRequest(now, body, dict(request.headers), count, new)
        self.seen.append(seen)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._stream(request, body, prompt, seen)
        finally:
            self.in_flight -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], prompt: str, seen: PlayedRequest
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        await asyncio.sleep(seen.at + self.fixed_s + self.per_token_s * seen.new_tokens - time.monotonic())
        if self.error_event:
            await response.write(event({"error": {"message": "engine died"}}))
            return response
        answer = ""
        wanted = body["max_tokens"]
        for number in range(wanted):
            if self.end_after == number:
                return response
            if self.cut_after == number:
                assert request.transport is not None
                request.transport.close()
                return response
            if number:
                await asyncio.sleep(seen.first_at + number * self.step_s - time.monotonic())
            piece = f"{number % 1000:03d} "
            await response.write(event({"choices": [{"delta": {"content": piece}}]}))
            seen.last_at = time.monotonic()
            seen.first_at = seen.first_at or seen.last_at
            answer += piece
        self.cache.append(prompt + answer)
        usage = {
            "prompt_tokens": seen.prompt_tokens,
            "completion_tokens": wanted,
            "prompt_tokens_details": {"cached_tokens": seen.prompt_tokens - seen.new_tokens},
        }
        await response.write(event({"choices": [{"delta": {}, "finish_reason": "length"}]}))
        await response.write(event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        return response


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def shared(one: str, other: str) -> int:
    """Return how many characters `one` and `other` have in common at the beginning."""
    return next(
        (at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
    )


def render(messages: list[dict[str, Any]]) -> str:
    """Return messages as one text, as a chat template renders them."""
    parts = []
    for message in messages:
        calls = orjson.dumps(message["tool_calls"]).decode() if "tool_calls" in message else ""
        frame = "" if message["role"] == "assistant" else f"<{message['role']}>"
        parts.append(f"{frame}{message['content']}{calls}")
    return "".join(parts)


def tokens(text: str) -> int:
    return OPENING + round(len(text) / CHARS_PER_TOKEN)
