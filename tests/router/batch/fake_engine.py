"""Fake engine over real sockets: answers like vLLM, logs served lines, and fails when a prompt asks for it.

Prompts may hold directives: `status=400`, `drop` (cut the connection), `sleep=0.2`, `flaky` (500 at first).
"""

import argparse
import asyncio
import re
from pathlib import Path
from typing import Any

import orjson

from router.http.request import Request
from router.http.response import Responder
from router.http.server import Server

MODEL = "tiny"
_JSON = [(b"content-type", b"application/json")]


class OfflineEngine:
    def __init__(self, delay_s: float = 0.002, log: Path | None = None) -> None:
        self.delay_s = delay_s
        self.served: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.asked = asyncio.Event()
        self.idle = asyncio.Event()
        self.running = 0
        self.peak = 0
        self.refuse_all = False
        self._seen: set[str] = set()
        self._log = log.open("a", buffering=1) if log else None
        self._server: Server | None = None
        self.address = ""

    async def start(self, port: int = 0) -> str:
        self._server = Server(self._handle)
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', port)}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.drain(0.0)
            self._server = None
        if self._log is not None:
            self._log.close()
            self._log = None

    async def _handle(self, request: Request, responder: Responder) -> None:
        body = orjson.loads(await request.body.read())
        prompt = _prompt(body)
        self.bodies.append(body)
        self.running += 1
        self.asked.set()
        self.idle.clear()
        self.peak = max(self.peak, self.running)
        try:
            sleep = re.search(r"sleep=([0-9.]+)", prompt)
            await _work(responder, float(sleep[1]) if sleep else self.delay_s)
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()
        if responder.disconnected:
            return
        if "drop" in prompt:
            responder.abort()
            return
        status = re.search(r"status=([0-9]+)", prompt)
        code = 503 if self.refuse_all else int(status[1]) if status else 200
        if "flaky" in prompt and prompt not in self._seen:
            self._seen.add(prompt)
            code = 500
        if code != 200:
            error = {
                "error": {"message": f"told to answer {code}", "type": "fake", "param": None, "code": code}
            }
            responder.respond(code, orjson.dumps(error), _JSON)
            return
        self.served.append(prompt)
        if self._log is not None:
            self._log.write(prompt + "\n")
        responder.respond(200, orjson.dumps(_answer(request.path, body, prompt)), _JSON)


async def _work(responder: Responder, seconds: float) -> None:
    """Work for `seconds`, or until the client disconnects, as engines abort the request of such a client."""
    left = asyncio.Event()
    forget = responder.on_disconnect(left.set)
    try:
        async with asyncio.timeout(seconds):
            await left.wait()
    except TimeoutError:
        pass
    finally:
        forget()


def _prompt(body: dict[str, Any]) -> str:
    if "messages" in body:
        return str(body["messages"][-1]["content"])
    return str(body.get("prompt") or body.get("input"))


def _answer(path: str, body: dict[str, Any], prompt: str) -> dict[str, Any]:
    tokens = {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}
    echo = f"echo {prompt}"
    match path:
        case "/v1/chat/completions":
            message = {"role": "assistant", "content": echo}
            choices: list[dict[str, Any]] = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return {
                "id": "c",
                "object": "chat.completion",
                "model": MODEL,
                "choices": choices,
                "usage": tokens,
            }
        case "/v1/completions":
            choices = [{"index": 0, "text": echo, "finish_reason": "stop"}]
            return {
                "id": "c",
                "object": "text_completion",
                "model": MODEL,
                "choices": choices,
                "usage": tokens,
            }
        case "/v1/responses":
            usage = {"input_tokens": len(prompt), "output_tokens": 5, "total_tokens": len(prompt) + 5}
            said = [{"type": "output_text", "text": echo, "annotations": []}]
            item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": said}
            return {"id": "r", "object": "response", "model": MODEL, "output": [item], "usage": usage}
    data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
    return {"object": "list", "model": MODEL, "data": data, "usage": {"prompt_tokens": len(prompt)}}


async def _main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--log", type=Path, required=True)
    options.add_argument("--delay", type=float, default=0.002)
    given = options.parse_args()
    engine = OfflineEngine(given.delay, given.log)
    print(await engine.start(given.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
