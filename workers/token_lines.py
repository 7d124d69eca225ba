"""Token lines: an engine's streams say which tokens they are made of, and can begin where another one ended.

Middleware of vLLM's server, asked for by gateways with a header. In front of each piece of such a stream goes
a line with vLLM's outputs since the piece before, as in `:12,13;14;`, which the gateway takes out again. The
first begins, if that is asked for, with the prompt's tokens and how many of them were cached, as in
`:=595/128=12;`: few clients ask for `usage`, and who places turns has to know. When
the engine ends, the gateway sends the request to another one with these outputs: they are put through the
same parsers in the same steps, the pieces that the client has are left out, and what follows is what would
have followed. All ids are drawn from a seed, and are the same again. What fails before it is past these
pieces is refused with a status: an answer that begins there would look whole.
"""

import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from kvtransfer.relied_on import verify
from kvtransfer.vllm_internals import CONTINUING, ReplayedOutputs, continue_generations

logger = logging.getLogger("conserve.workers.token_lines")

# What gateways say and are told (router/http/responder.py).
PIECES = b"x-stream-pieces"  # asks for lines; so many pieces has the client already
SEED = b"x-stream-seed"
CREATED = b"x-stream-created"  # when the answer began, as the client was told
COUNTS = b"x-stream-counts"  # the first line is to say how long the prompt is: a gateway of before reads none
REQUEST_ID = b"x-request-id"  # vLLM names the answer after it
NOT_TO_BE_CONTINUED = b"-"

# How an error of vLLM's looks as a piece, in each API.
_ERROR = re.compile(rb'event: error\n|data: \{"error"|event: response\.failed\n')
_REFUSED = b'{"error":{"message":"this engine cannot go on with the answer","type":"InternalServerError"}}'

_CREATED_AT = re.compile(rb'"created(?:_at)?": ?([0-9.]+)')

_COUNT = re.compile(rb"[0-9]{1,9}")

AsgiMessage = MutableMapping[str, Any]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiApp = Callable[[MutableMapping[str, Any], AsgiReceive, AsgiSend], Awaitable[None]]


def _counts(output: Any) -> bytes:
    prompt, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens
    return b"=%d=" % prompt if cached is None else b"=%d/%d=" % (prompt, max(0, cached))


class TokenLines:
    """One answer on its way out."""

    def __init__(self, send: AsgiSend, pieces: int, seed: str, created: bytes, counts: bool = False) -> None:
        self.replay: ReplayedOutputs | None = None
        self._send = send
        self._had = pieces
        self._seed, self._drawn = seed, 0
        self._created, self._created_here = created, b""
        self._outputs = b""  # since the last piece
        self._generations = 0
        self._counts = counts  # the prompt, once
        self._streams = self._engine_died = self._refused = False
        self._held: AsgiMessage | None = None  # the head, until there is a piece that the client lacks

    def next_id(self) -> str:
        self._drawn += 1
        return hashlib.blake2b(f"{self._seed}/{self._drawn}".encode(), digest_size=8).hexdigest()

    async def follow(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        self._generations += 1
        if self._generations > 1:  # several prompts, or a tool that the engine called by itself
            self._outputs += NOT_TO_BE_CONTINUED
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":
                        self._engine_died = True  # it is told to end: nobody else aborts what is still read
                    if self.replay is not None and output.num_cached_tokens:
                        most = len(output.prompt_token_ids or ())  # the first engine's answer is no prompt
                        output.num_cached_tokens = min(output.num_cached_tokens, most)
                    if self._counts and self._generations == 1:  # of several prompts it would say one's
                        self._outputs = _counts(output) + self._outputs
                    self._counts = False
                    self._outputs += ",".join(map(str, output.outputs[0].token_ids)).encode() + b";"
                    yield output
                    if self.replay is not None:
                        await self.replay.go_on()
            except EngineDeadError:
                self._engine_died = True
                raise

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self._streams = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in headers
            )
            if self._streams:
                message["headers"] = [*headers, (PIECES, b"%d" % self._had)]
                if self._had:
                    self._held = message
                    return
        elif self._streams:
            if self._refused:
                return
            if self._engine_died:
                await self._send_head()
                return  # nor an end: the server cuts the connection, and the gateway goes on elsewhere
            body = message.get("body", b"")
            ended = not message.get("more_body", False)
            short = ended and (self._had or (self.replay is not None and self.replay.left))
            if self._held is not None and (short or _ERROR.match(body)):
                await self._refuse()
                return
            if body and not body.startswith(b": "):  # a comment, which keeps the connection alive
                if body.find(b"\n\n") != len(body) - 2:  # the client may get one of several events
                    self._outputs += NOT_TO_BE_CONTINUED
                line, self._outputs = b":%b\n" % self._outputs, b""
                body = self._dated(body)
                if self._had:
                    self._had -= 1
                    return
                message["body"] = line + body
                await self._send_head()
            elif ended:
                await self._send_head()
            if self._held is not None:
                return  # a comment, in front of a piece that the client has
        await self._send(message)

    async def _send_head(self) -> None:
        head, self._held = self._held, None
        if head is not None:
            await self._send(head)

    async def _refuse(self) -> None:
        logger.error("an answer failed or ended before the place where it was to go on")
        self._refused, self._held = True, None
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(_REFUSED))]
        await self._send({"type": "http.response.start", "status": 500, "headers": headers})
        await self._send({"type": "http.response.body", "body": _REFUSED})

    def _dated(self, piece: bytes) -> bytes:
        if not self._created:
            return piece
        if not self._created_here and (found := _CREATED_AT.search(piece)):
            self._created_here = found[1]
        if not self._created_here:
            return piece
        here, there = b":" + self._created_here, b":" + self._created
        return piece.replace(b'"created"' + here, b'"created"' + there, 1).replace(
            b'"created_at"' + here, b'"created_at"' + there, 1
        )


_CURRENT: ContextVar[TokenLines | None] = ContextVar("token_lines", default=None)


class TokenLinesMiddleware:
    def __init__(self, app: AsgiApp) -> None:
        verify(CONTINUING)
        continue_generations(_CURRENT.get)
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: AsgiReceive, send: AsgiSend) -> None:
        said = dict(scope.get("headers", ())) if scope["type"] == "http" else {}
        pieces, seed, created = said.get(PIECES, b""), said.get(SEED, b""), said.get(CREATED, b"")
        if not (_COUNT.fullmatch(pieces) and seed):  # the gateway sees that there are no lines
            await self._app(scope, receive, send)
            return
        lines = TokenLines(send, int(pieces), seed.decode("latin-1"), created, COUNTS in said)
        if REQUEST_ID not in said:
            scope = {**scope, "headers": [*scope["headers"], (REQUEST_ID, lines.next_id().encode())]}
        token = _CURRENT.set(lines)
        try:
            await self._app(scope, receive, lines.send)
        finally:
            _CURRENT.reset(token)
