"""Middleware of vLLM's server that makes its answers say more, where gateways ask for it with a header.

*Token lines*: an engine's streams say which tokens they are made of, and can begin where another one ended.
In front of each piece of such a stream goes a line with vLLM's outputs since the piece before, as in
`:12,13;14;`, which the gateway takes out again. The first begins, if that is asked for, with the prompt's
tokens and how many of them were cached, as in `:=595/128=12;`: few clients ask for `usage`, and who places
turns has to know. When the engine ends, the gateway sends the request to another one with these outputs: they
are put through the same parsers in the same steps, the pieces that the client has are left out, and what
follows is what would have followed. All ids are drawn from a seed, and are the same again. What fails before
it is past these pieces is refused with a status: an answer that begins there would look whole.

*Response fields*: answers of the Responses API say whose history they go on from. An engine gets the whole
history as input (`router/gateway/responses`), so that it knows no answer before its own and says `null`; the
gateway says in a header what the field is to be. Only the response's own field changes: what a client sent
and the answer echoes (tools' schemas) may have a field of that name too. All else stays as it is written.
"""

import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import orjson
from vllm.v1.engine.exceptions import EngineDeadError

from kvtransfer.compat.relied_on import verify
from workers.engine.compat.stream_replay import CONTINUING, ReplayedOutputs, continue_generations

logger = logging.getLogger("conserve.workers.answer_middleware")

# Headers of the resume protocol (router/http/streams/resume.py).
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
SAYS = b"x-response-says"  # router/gateway/responses/stored_answers.py
_FIELD = "previous_response_id"
_UNSAID = (b'"previous_response_id":null', b'"previous_response_id": null')
_DATA = b"data: "
_DECODER = json.JSONDecoder(parse_int=float)  # whole numbers of any length
_LENGTH = b"content-length"


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


class ResponseFieldsMiddleware:
    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: AsgiReceive, send: AsgiSend) -> None:
        headers = scope.get("headers", ()) if scope["type"] == "http" else ()
        said = next((value for name, value in headers if name == SAYS), b"")
        await self._app(scope, receive, _Saying(send, said).send if said else send)


class _Saying:
    def __init__(self, send: AsgiSend, said: bytes) -> None:
        self._send, self._said = send, orjson.dumps(orjson.loads(said))[1:-1]
        self._head: AsgiMessage | None = None  # until the length of what follows is known

    async def send(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        body = message.get("body", b"")
        if any(unsaid in body for unsaid in _UNSAID):
            body = self._whole(body) if body.startswith(b"{") else self._events(body)
        head, self._head = self._head, None
        if head is not None:
            longer = len(body) - len(message.get("body", b""))
            head["headers"] = [
                (name, b"%d" % (int(value) + longer) if name.lower() == _LENGTH else value)
                for name, value in head.get("headers", ())
            ]
            await self._send(head)
        await self._send({**message, "body": body})

    def _events(self, body: bytes) -> bytes:
        lines = body.split(b"\n")
        for number, line in enumerate(lines):
            if line.startswith(_DATA) and any(unsaid in line for unsaid in _UNSAID):
                lines[number] = _DATA + self._whole(line.removeprefix(_DATA))
        return b"\n".join(lines)

    def _whole(self, document: bytes) -> bytes:
        """Of a response, or of an event that has one."""
        text = document.decode("latin-1")  # a character a byte
        try:
            response = _field(text, 0, "response")
            found = _field(text, response[1] if response is not None else 0, _FIELD)
        except (ValueError, IndexError, RecursionError):  # no JSON that could be read
            return document
        if found is None or found[2] is not None:
            return document
        name, value, _ = found
        return document[:name] + self._said + document[value + len("null") :]


def _field(text: str, at: int, name: str) -> tuple[int, int, Any] | None:
    """Of the object that begins there: where its name stands, where its value, and the value."""
    at = _next(text, at + 1)
    while text[at] != "}":
        named_at = at
        named, at = _DECODER.raw_decode(text, at)
        value_at = _next(text, _next(text, at) + 1)
        value, at = _DECODER.raw_decode(text, value_at)
        if named == name:
            return named_at, value_at, value
        at = _next(text, at)
        if text[at] == ",":
            at = _next(text, at + 1)
    return None


def _next(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at
