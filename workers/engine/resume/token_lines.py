"""Middleware of vLLM's server that makes streams which another engine can continue, if a gateway asks for it.

Before each piece of the stream it sends a token line: the tokens of vLLM's outputs since the previous piece,
as in `:12,13;14;`. The gateway removes these lines. If the gateway asks, the first line begins with the
number of prompt tokens and of cached ones, as in `:=595/128=12;`. Placing needs them, and few clients ask for
`usage`.

When the engine ends, the gateway sends the request and these outputs to another engine. That engine passes
the outputs through the same parsers in the same steps, omits the pieces that the client has, and continues.
All ids are made from a seed, so that they are the same again. If the answer fails before the client's place
is reached, its status is an error, because an answer without the missing pieces would look whole.
"""

import hashlib
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from kvtransfer.compat.relied_on import verify
from workers.engine.asgi_messages import App, Message, Receive, Scope, Send, answer_json, is_event_stream
from workers.engine.compat.stream_replay import CONTINUING, ReplayedOutputs, continue_generations

logger = logging.getLogger("conserve.workers.token_lines")

# Headers of the resume protocol (router/http/streams/resume.py).
PIECES = b"x-stream-pieces"  # asks for token lines; value: the number of pieces that the client has
SEED = b"x-stream-seed"
CREATED = b"x-stream-created"  # creation time of the answer that the client has
COUNTS = b"x-stream-counts"  # asks for the prompt's length in the first line
REQUEST_ID = b"x-request-id"  # from which vLLM makes the answer's id
NOT_RESUMABLE = b"-"

# Beginning of a piece that reports an error, in each API.
_ERROR = re.compile(rb'event: error\n|data: \{"error"|event: response\.failed\n')
_REFUSED = b'{"error":{"message":"this engine cannot go on with the answer","type":"InternalServerError"}}'
_CREATED_AT = re.compile(rb'"created(?:_at)?": ?([0-9.]+)')
_COUNT = re.compile(rb"[0-9]{1,9}")


class TokenLines:
    """State of one answer on its way to the gateway."""

    def __init__(self, send: Send, pieces: int, seed: str, created: bytes, counts: bool = False) -> None:
        self.replay: ReplayedOutputs | None = None
        self._send = send
        self._pieces_to_skip = pieces
        self._seed, self._ids = seed, 0
        self._created, self._created_here = created, b""
        self._outputs = b""  # tokens of outputs since the last piece
        self._generations = 0
        self._counts = counts  # whether the prompt's length is still to be reported
        self._streams = self._engine_died = self._refused = False
        self._head: Message | None = None  # held until the first piece that the client lacks

    def next_id(self) -> str:
        self._ids += 1
        return hashlib.blake2b(f"{self._seed}/{self._ids}".encode(), digest_size=8).hexdigest()

    async def follow(self, outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield a generation's outputs while recording their tokens, and advance the replay after each."""
        self._generations += 1
        if self._generations > 1:  # the request has several prompts, or the engine called a tool itself
            self._outputs += NOT_RESUMABLE
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if output.outputs[0].finish_reason == "abort":
                        self._engine_died = True  # a stream with a reader is aborted only if the engine ends
                    if self.replay is not None and output.num_cached_tokens:
                        # The tokens that the first engine generated do not belong to the prompt.
                        prompt = len(output.prompt_token_ids or ())
                        output.num_cached_tokens = min(output.num_cached_tokens, prompt)
                    if self._counts and self._generations == 1:
                        self._outputs = _counts(output) + self._outputs
                    self._counts = False
                    self._outputs += ",".join(map(str, output.outputs[0].token_ids)).encode() + b";"
                    yield output
                    if self.replay is not None:
                        await self.replay.go_on()
            except EngineDeadError:
                self._engine_died = True
                raise

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = is_event_stream(message)
            if self._streams:
                pieces = (PIECES, b"%d" % self._pieces_to_skip)
                message["headers"] = [*message.get("headers", ()), pieces]
                if self._pieces_to_skip:
                    self._head = message
                    return
        elif self._streams and not await self._prepare(message):
            return
        await self._send(message)

    async def _prepare(self, message: Message) -> bool:
        """Put the token line in front of the message's piece, and return whether to send the message."""
        if self._refused:
            return False
        if self._engine_died:
            await self._send_head()
            # The answer gets no end, so the server cuts the connection and the gateway resumes elsewhere.
            return False
        body = message.get("body", b"")
        ended = not message.get("more_body", False)
        too_short = ended and (self._pieces_to_skip or (self.replay is not None and self.replay.left))
        if self._head is not None and (too_short or _ERROR.match(body)):
            await self._refuse()
            return False
        if body and not body.startswith(b": "):  # a comment only keeps the connection alive
            if body.find(b"\n\n") != len(body) - 2:  # the client may get only some of several events
                self._outputs += NOT_RESUMABLE
            line, self._outputs = b":%b\n" % self._outputs, b""
            body = self._with_first_date(body)
            if self._pieces_to_skip:
                self._pieces_to_skip -= 1
                return False
            message["body"] = line + body
            await self._send_head()
        elif ended:
            await self._send_head()
        return self._head is None  # comments before the first missing piece are omitted

    async def _send_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            await self._send(head)

    async def _refuse(self) -> None:
        logger.error("an answer failed or ended before the place where it was to be resumed")
        self._refused, self._head = True, None
        await answer_json(self._send, 500, _REFUSED)

    def _with_first_date(self, piece: bytes) -> bytes:
        """Return the piece with the creation time that the client has, instead of this engine's."""
        if not self._created:
            return piece
        if not self._created_here and (found := _CREATED_AT.search(piece)):
            self._created_here = found[1]
        if not self._created_here:
            return piece
        for field in (b'"created":', b'"created_at":'):
            piece = piece.replace(field + self._created_here, field + self._created, 1)
        return piece


def _counts(output: Any) -> bytes:
    prompt, cached = len(output.prompt_token_ids or ()), output.num_cached_tokens
    return b"=%d=" % prompt if cached is None else b"=%d/%d=" % (prompt, max(0, cached))


_CURRENT: ContextVar[TokenLines | None] = ContextVar("token_lines", default=None)


class TokenLinesMiddleware:
    """Middleware that adds token lines to answers whose request asks for them."""

    def __init__(self, app: App) -> None:
        verify(CONTINUING)
        continue_generations(_CURRENT.get)
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ())) if scope["type"] == "http" else {}
        pieces, seed = headers.get(PIECES, b""), headers.get(SEED, b"")
        if not (_COUNT.fullmatch(pieces) and seed):
            await self._app(scope, receive, send)
            return
        created = headers.get(CREATED, b"")
        lines = TokenLines(send, int(pieces), seed.decode("latin-1"), created, COUNTS in headers)
        if REQUEST_ID not in headers:
            scope = {**scope, "headers": [*scope["headers"], (REQUEST_ID, lines.next_id().encode())]}
        token = _CURRENT.set(lines)
        try:
            await self._app(scope, receive, lines.send)
        finally:
            _CURRENT.reset(token)
