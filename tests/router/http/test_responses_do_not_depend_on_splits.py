"""Tests of responses: the client gets the same bytes, however the engine's bytes are split."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httptools
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import UpstreamError
from router.http import Endpoint, Observation, RawHeaders, StreamObserver, UpstreamLimits, UpstreamRequest
from router.http.exchange import RelayExchange
from router.http.response import Responder
from router.http.upstream import UpstreamConnection
from tests.router.http.engine import STREAM_HEAD


class Owner:
    """Stand-in for a pool, whose one connection is used for one response only."""

    splice_loop = None
    engine_key = ""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.limits = UpstreamLimits()

    def connection_free(self, connection: UpstreamConnection) -> None: ...

    def connection_gone(self, connection: UpstreamConnection) -> None: ...


class Wire:
    """Stand-in for a socket's transport, which records what is written to it."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: Any) -> None:
        self.written += b"".join(parts)

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def get_extra_info(self, name: str) -> None:
        return None


class ResponseHost:
    must_close = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.finished = False

    def response_finished(self, *, keep_alive: bool) -> None:
        self.finished = True

    def abort(self) -> None:
        pass


class Decoded:
    """Response of the gateway, as a client's parser sees it."""

    def __init__(self, raw: bytes) -> None:
        self.body = b""
        self.whole = False
        self.error: Exception | None = None
        try:
            httptools.HttpResponseParser(self).feed_data(raw)
        except httptools.HttpParserError as error:
            self.error = error

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.whole = True


Relayed = tuple[bytes, bool, UpstreamError | None, Observation]


def relayed(pieces: list[bytes]) -> Relayed:
    async def run() -> Relayed:
        loop = asyncio.get_running_loop()
        client, engine = Wire(), Wire()
        observer = StreamObserver(lambda: 1.0)
        responder = Responder(ResponseHost(loop), client)  # type: ignore[arg-type]
        passing = RelayExchange(loop, responder, observer, frozenset())
        connection = UpstreamConnection(Endpoint("h", 1), Owner(loop))
        connection.connection_made(engine)  # type: ignore[arg-type]
        passing.connection = connection
        connection.send(UpstreamRequest("POST", b"/", RawHeaders()), passing)
        for piece in pieces:
            if not engine.aborted:
                connection.data_received(piece)
        outcome = passing.ended.result() if passing.ended.done() else None
        seen = Decoded(client.written)
        assert seen.error is None
        error = outcome.error if outcome else None
        return seen.body, seen.whole, error, observer.observation()

    return asyncio.run(run())


event = st.sampled_from(
    [
        b"data: 1\n\n",
        b'data: {"content":"a"}\n\n',
        b'data: {"error":{}}\n\n',
        b"data: [DONE]\n\n",
        b"event: x\ndata: " + b"y" * 300 + b"\n\n",
    ]
)
framed = st.lists(event, min_size=1, max_size=3).map(b"".join).map(lambda e: b"%x\r\n%b\r\n" % (len(e), e))
# No empty events, because their number depends on the splits; engines send none.
odd = st.sampled_from(
    [b"A\r\ndata: 12\n\n\r\n", b"3;ext=1\r\nabc\r\n", b"5\r\ndata:\r\n2\r\n\n\n\r\n", b"5\r\ndata:\r\n"]
)
bad = st.sampled_from(
    [b"", b"", b"zz\r\n", b"+5\r\nhello\r\n", b"5\nhello\n", b" 5\r\nhello\r\n", b"5\r\nhelloX"]
)


def test_the_rest_of_a_chunk_is_not_taken_for_a_chunk_of_its_own() -> None:
    """The second piece looks like a whole chunk, but it is the rest of the chunk before."""
    pieces = [b"3\r\nabc\r\n5;a", b"5\r\nhello\r\n", b"0\r\n\r\n"]
    assert relayed([STREAM_HEAD, *pieces])[:3] == (b"abchello", True, None)


def test_the_beginning_of_a_chunk_is_not_taken_for_a_whole_chunk() -> None:
    """The piece has the length of a chunk of nine bytes, but its size line says fifteen."""
    pieces = [b"8\r\ndata: 1\n\r\n", b"f\r\ndata: x\n\n\r\n", b"abcd\r\n0\r\n\r\n"]
    assert relayed([STREAM_HEAD, *pieces])[:3] == (b"data: 1\ndata: x\n\n\r\nabcd", True, None)


@settings(max_examples=300, deadline=None)
@given(st.lists(framed | odd, max_size=8), bad, st.lists(st.integers(0, 3000), max_size=15), st.booleans())
def test_a_response_split_anywhere_reaches_the_client_unchanged(
    chunks: list[bytes], tail: bytes, cuts: list[int], aligned: bool
) -> None:
    text = b"".join(chunks) + (tail or b"0\r\n\r\n")
    pieces = [*chunks, tail or b"0\r\n\r\n"]
    if not aligned:
        places = [0, *sorted({cut % len(text) for cut in cuts}), len(text)]
        pieces = [text[a:b] for a, b in pairwise(places)]
    body, whole, error, seen = relayed([STREAM_HEAD, *pieces])
    body_at_once, whole_at_once, error_at_once, seen_at_once = relayed([STREAM_HEAD + text])
    assert (whole, type(error)) == (whole_at_once, type(error_at_once))
    if error is None:
        assert body == body_at_once
        # Only the number of events after the first content depends on the splits.
        assert seen._replace(gaps=0) == seen_at_once._replace(gaps=0)
