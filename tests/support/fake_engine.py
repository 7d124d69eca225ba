"""Fake engine that serves vLLM's HTTP API over real sockets and computes nothing.

With a `curve`, prompts take time and are computed one after another; the decoder of a transferred turn waits
until the prefiller has computed the prompt.

The engine counts each byte of a prompt as a token, records its requests, holds KV for each conversation and
reports it as a real engine would. `python -m tests.support.fake_engine --name d0` runs one as a process and
prints its port.
"""

import argparse
import asyncio
import itertools
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from placement.engines import EngineInfo, EngineState, Role
from placement.scheduling.prefill_curve import PrefillCurve

_IDS = itertools.count(1)


@dataclass
class SeenRequest:
    """One request as it arrived at the fake engine."""

    path: str
    conversation: str
    body: dict[str, Any]
    raw: bytes
    headers: dict[str, str]

    @property
    def params(self) -> dict[str, Any]:
        return self.body.get("kv_transfer_params") or {}


@dataclass
class FakeEngine:
    name: str
    role: Role = Role.DECODE
    epoch: int = 1
    kv_tokens: int = 100_000
    max_context: int = 50_000
    token_s: float = 0.002
    prefill_s: float = 0.0
    curve: PrefillCurve | None = None
    handed_over: dict[str, asyncio.Event] = field(default_factory=dict)  # by transfer id; shared by engines
    seen: list[SeenRequest] = field(default_factory=list)
    held: Counter[str] = field(default_factory=Counter)
    confirmed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    prefetched: list[tuple[str, float]] = field(default_factory=list)  # conversation, seconds until its turn
    has_kv: bool = True  # the answer to a prefetch
    draining: bool = False
    waiting_prompt_tokens: int = 0  # reported, like the next two
    prompt_tokens_per_s: float = 0.0
    prompt_share: float = 1.0
    parked: dict[str, int] = field(default_factory=dict)  # conversation -> number of the report that names it
    lives: dict[str, float] = field(
        default_factory=dict
    )  # lifetimes by conversation, as the gateway sent them
    calls_tools: bool = False  # each streamed answer ends with a tool call
    reasons: bool = False  # answers that are not streamed have reasoning
    cached: int | None = None  # reported cached tokens of each prompt
    waiting: int = 0  # reported waiting requests
    running: int = 0
    aborted: int = 0
    fail_status: int = 0
    fail_body: str = ""
    dies_of: bytes = b""  # a request that contains this breaks its connection, as if the process had died
    fail_after: int = 0  # tokens after which a stream ends in vLLM's error event
    cut_after: int = 0  # tokens after which the connection of a stream breaks
    silent_after: int = 0  # tokens after which a stream goes silent, as if its machine had vanished
    lines: bool = True  # writes token lines on request
    host: str = "127.0.0.1"
    port: int = 0
    control: str = ""  # host:port of its keeper's service
    reports: int = 0  # state reports so far
    _runner: web.AppRunner | None = None
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", _ok)
        app.router.add_get("/_seen", self._show_seen)
        app.router.add_get("/_state", self._show_state)
        app.router.add_post("/_release", self._release)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
            app.router.add_post(path, self._generate)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/embeddings", self._embed)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def info(self) -> EngineInfo:
        tier = "prefill" if self.role is Role.PREFILL else "decode"
        address = f"{self.host}:{self.port}"
        addresses = address, address, self.control
        return EngineInfo(
            self.name, tier, self.role, self.epoch, *addresses, self.kv_tokens, 16, self.max_context
        )

    def state(self) -> EngineState:
        self.reports += 1
        live = self.held.total()
        confirmed, self.confirmed = dict.fromkeys(self.confirmed, self.reports), []
        return EngineState(
            self.name,
            self.epoch,
            self.reports,
            live,
            0,
            0,
            self.kv_tokens - live,
            self.running,
            self.waiting,
            confirmed=confirmed,
            parked=dict(self.parked),
            draining=self.draining,
            waiting_prompt_tokens=self.waiting_prompt_tokens,
            prompt_tokens_per_s=self.prompt_tokens_per_s,
            prompt_share=self.prompt_share,
        )

    def release(self, key: str) -> None:
        self.held.pop(key, None)
        self.released.append(key)

    def prefetch(self, key: str, due_in_s: float) -> bool:
        self.prefetched.append((key, due_in_s))
        return self.has_kv

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        key = request.headers.get("x-session-id", "")
        self.seen.append(SeenRequest(request.path, key, body, raw, dict(request.headers)))
        if self.dies_of and self.dies_of in raw and request.transport is not None:
            request.transport.abort()
        if self.fail_status:
            return web.Response(status=self.fail_status, text=self.fail_body, content_type="application/json")
        prompt = prompt_size(body)
        if prompt > self.max_context:
            error = {"message": f"maximum context length is {self.max_context}", "type": "BadRequestError"}
            return web.json_response({"error": error}, status=400)
        self.running += 1
        said = (body.get("kv_transfer_params") or {}).get("conversation") or {}
        self.lives.update({key: said["ttl_s"]} if "ttl_s" in said else {})
        self.parked.pop(key, None)
        try:
            if not isinstance(body.get("stream_options") or {}, dict):  # vLLM refuses it too
                return web.json_response({"error": {"message": "stream_options is wrong"}}, status=400)
            answer = await self._answer(request, body, key, prompt)
            if said.get("park_after_s") == 0:
                self.parked[key] = self.reports + 1
            return answer
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _answer(
        self, request: web.Request, body: dict[str, Any], key: str, prompt: int
    ) -> web.StreamResponse:
        await self._prefill(body.get("kv_transfer_params") or {}, max(1, prompt - self.held[key]))
        count = int(body.get("max_tokens") or body.get("max_output_tokens") or 4)
        if self.role is not Role.PREFILL or "kv_transfer_params" not in body:
            self.held[key] = prompt + count
            self.confirmed.append(key)
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        if self.cached is not None:
            cached = min(self.cached, prompt + len(_given(body)))  # resumed tokens count too
            usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
        responses, messages = request.path == "/v1/responses", request.path == "/v1/messages"
        if responses or messages:
            usage = {"input_tokens": prompt, "output_tokens": count, "total_tokens": prompt + count}
        answer_id = f"resp_{self.name}_{next(_IDS)}" if responses else f"cmpl-{next(_IDS)}"
        if not body.get("stream"):
            await asyncio.sleep(self.token_s * count)
            whole = _whole(request.path, answer_id, count, usage)
            if responses:
                whole |= {"output": _said(body, count), **_history(request)}
            if self.reasons:
                whole["choices"][0]["message"]["reasoning"] = "because"
            if self.calls_tools:
                whole["choices"][0] |= {"finish_reason": "tool_calls"}
                whole["choices"][0]["message"]["tool_calls"] = [{"id": "c", "type": "function"}]
            return web.json_response(whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        pieces = _Pieces(response, request, body, self, prompt)
        await response.prepare(request)
        if messages:
            await self._stream_message(pieces, answer_id, count, usage)
            return response
        for number in range(count):
            await pieces.token(number)
            if self.fail_after and number == self.fail_after:
                error = {"message": "Internal server error", "type": "InternalServerError", "code": 500}
                await pieces.write(_event({"error": error}))
                break
            last = number == count - 1
            await pieces.write(_chunk(request.path, answer_id, number, last, last and self.calls_tools))
        if responses:
            done = {
                "type": "response.completed",
                "response": {"id": answer_id, "status": "completed", "usage": usage},
            }
            done["response"] |= {"output": _said(body, count), **_history(request)}  # type: ignore[operator]
            await pieces.write(b"event: response.completed\n" + _event(done))
        else:
            if (body.get("stream_options") or {}).get("include_usage"):
                await pieces.write(_event({"id": answer_id, "choices": [], "usage": usage}))
            await pieces.write(b"data: [DONE]\n\n")
        return response

    async def _prefill(self, params: dict[str, Any], tokens: int) -> None:
        if self.curve is None:
            await asyncio.sleep(self.prefill_s)
            return
        transfer = self.handed_over.setdefault(params.get("transfer_id", ""), asyncio.Event())
        if params.get("do_remote_prefill"):
            await transfer.wait()
            return
        self.waiting_prompt_tokens += tokens
        try:
            async with self._computing:
                await asyncio.sleep(self.curve.seconds(tokens))
        finally:
            self.waiting_prompt_tokens -= tokens
        if params:
            transfer.set()

    async def _stream_message(
        self, pieces: "_Pieces", answer_id: str, count: int, usage: dict[str, int]
    ) -> None:
        start = {
            **_whole("/v1/messages", answer_id, 0, {"input_tokens": 0, "output_tokens": 0}),
            "content": [],
        }
        await pieces.write(_named("message_start", message=start))
        block = {"type": "text", "text": ""}
        await pieces.write(_named("content_block_start", index=0, content_block=block))
        for number in range(count):
            await pieces.token(number)
            delta = {"type": "text_delta", "text": f"w{number} "}
            await pieces.write(_named("content_block_delta", index=0, delta=delta))
        await pieces.write(_named("content_block_stop", index=0))
        stop = {"stop_reason": "end_turn", "stop_sequence": None}
        await pieces.write(_named("message_delta", delta=stop, usage=usage))
        await pieces.write(_named("message_stop"))

    async def _embed(self, request: web.Request) -> web.Response:
        """Answer an embeddings request; each byte of the input counts as a token."""
        if self.fail_status:
            return web.Response(status=self.fail_status, text=self.fail_body, content_type="application/json")
        await asyncio.sleep(self.token_s)
        tokens = len((await request.json())["input"])
        data = [{"object": "embedding", "index": 0, "embedding": [0.5] * 3000}]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return web.json_response({"object": "list", "data": data, "usage": usage})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.seen.append(SeenRequest(request.path, "", json.loads(raw), raw, dict(request.headers)))
        return web.json_response({"input_tokens": len(raw)})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": list(str(body.get("prompt", "")).encode()), "engine": self.name})

    async def _show_seen(self, request: web.Request) -> web.Response:
        seen = [{"path": s.path, "conversation": s.conversation, "params": s.params} for s in self.seen]
        return web.json_response({"seen": seen, "released": self.released, "aborted": self.aborted})

    async def _show_state(self, request: web.Request) -> web.Response:
        state = self.state()
        return web.json_response({name: getattr(state, name) for name in EngineState.__slots__})

    async def _release(self, request: web.Request) -> web.Response:
        self.release((await request.json())["key"])
        return web.json_response({})


def _given(body: dict[str, Any]) -> list[int]:
    """Return the tokens that another engine generated for this stream; none if it is not resumed."""
    resume = (body.get("kv_transfer_params") or {}).get("resume") or {"outputs": []}
    return [token for output in resume["outputs"] for token in output]


class _Pieces:
    """Writer of a stream's events, from the event on that the request names, with token lines on request."""

    def __init__(
        self,
        response: web.StreamResponse,
        request: web.Request,
        body: dict[str, Any],
        engine: FakeEngine,
        prompt: int,
    ) -> None:
        asked = request.headers.get("x-stream-pieces")
        self._response, self._request, self._engine = response, request, engine
        self._lined = asked is not None and engine.lines
        self._had = int(asked or 0)
        self._tokens: list[int] = []
        self._given = _given(body)
        cached = b"" if engine.cached is None else b"/%d" % min(engine.cached, prompt)
        self._counts = b"=%d%b=" % (prompt, cached) if "x-stream-counts" in request.headers else b""
        if self._lined:
            response.headers["x-stream-pieces"] = asked or ""

    async def token(self, number: int) -> None:
        """Wait as long as a token takes; add its id to the next token line. Resumed tokens take no time."""
        self._tokens.append(1000 + number)
        if number < len(self._given):
            assert self._given[number] == 1000 + number
            return
        if self._engine.cut_after and number >= self._engine.cut_after and self._request.transport:
            self._request.transport.abort()
        if self._engine.silent_after and number == self._engine.silent_after:
            await asyncio.Event().wait()
        await asyncio.sleep(self._engine.token_s)

    async def write(self, data: bytes) -> None:
        line = b""
        if self._lined:
            line = b":" + self._counts + b"".join(b"%d;" % token for token in self._tokens) + b"\n"
        self._tokens, self._counts = [], b""
        if self._had:
            self._had -= 1
        else:
            await self._response.write(line + data)


def prompt_size(body: dict[str, Any]) -> int:
    prompt = body.get("messages") or body.get("input") or body.get("prompt") or ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return len(prompt)
    return len(prompt) if isinstance(prompt, str) else len(json.dumps(prompt))


def _whole(path: str, answer_id: str, count: int, usage: dict[str, int]) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"id": answer_id, "object": "response", "status": "completed", "usage": usage, "output": []}
    text = "w " * count
    if path == "/v1/messages":
        blocks = [{"type": "text", "text": text}]
        message = {"type": "message", "role": "assistant", "model": "small", "content": blocks}
        return {"id": answer_id, **message, "stop_reason": "end_turn", "usage": usage}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    if path == "/v1/completions":
        choice = {"index": 0, "finish_reason": "stop", "text": text}
    return {"id": answer_id, "choices": [choice], "usage": usage}


def _said(body: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the output of a Responses answer: a message, and a call of the first tool if there are tools."""
    text = {"type": "output_text", "text": "w " * count, "annotations": []}
    said: list[dict[str, Any]] = [{"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}]
    calls = [
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": tool["name"], "arguments": "{}"}
        for tool in (body.get("tools") or [])[:1]
    ]
    return said + calls


def _history(request: web.Request) -> dict[str, Any]:
    """Return the answer's fields that name its history, which an engine's middleware takes from a header."""
    said = request.headers.get("x-response-says", '{"previous_response_id": null}')
    return dict(json.loads(said))


def _chunk(path: str, answer_id: str, number: int, last: bool, tool: bool = False) -> bytes:
    text = f"w{number} "
    if path == "/v1/responses":
        kind = "response.created" if number == 0 else "response.output_text.delta"
        return _event({"type": kind, "response": {"id": answer_id}, "delta": text})
    if tool and path == "/v1/chat/completions":
        call = {"index": 0, "id": "call", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = {"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        return _event({"id": answer_id, "choices": [said]})
    choice: dict[str, Any] = {
        "index": 0,
        "delta": {"content": text},
        "finish_reason": "stop" if last else None,
    }
    if path == "/v1/completions":
        choice = {"index": 0, "text": text, "finish_reason": "stop" if last else None}
    return _event({"id": answer_id, "choices": [choice]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _named(name: str, **data: Any) -> bytes:
    return f"event: {name}\n".encode() + _event({"type": name, **data})


async def _ok(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _main(options: argparse.Namespace) -> None:
    engine = FakeEngine(options.name, Role(options.role), options.epoch, token_s=options.token_s)
    await engine.start(options.port)
    print(engine.port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--role", default="decode")
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token-s", type=float, default=0.002)
    try:
        asyncio.run(_main(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(0)
