"""Tests of request parsing: the result does not depend on how the bytes were split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ApiError
from router.http import ServerLimits
from router.http.parsers import RequestParser
from router.http.request import RequestHead

LIMITS = ServerLimits(max_url_bytes=200, max_headers=10, max_head_bytes=1000)


class ParsedEvents:
    """Records the events of a parser, and joins the pieces of each body."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def head_complete(self, head: RequestHead) -> None:
        self.events.append((head._replace(headers=None), head.headers.raw))  # type: ignore[arg-type]

    def body_received(self, data: bytes) -> None:
        if self.events and isinstance(self.events[-1], bytes):
            data = self.events.pop() + data  # type: ignore[operator]
        self.events.append(data)

    def request_complete(self) -> None:
        self.events.append("complete")


def parsed(pieces: list[bytes]) -> tuple[list[object], tuple[int, str | None] | None]:
    seen = ParsedEvents()
    parser = RequestParser(LIMITS, seen)
    try:
        for piece in pieces:
            parser.feed(piece)
    except ApiError as refusal:
        return seen.events, (refusal.status, refusal.code)
    return seen.events, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in pairwise(places) if a < b]


line = st.sampled_from(
    [
        b"host: gateway",
        b"Host: other",
        b"content-length: 5",
        b"content-length: 0",
        b"content-length: +5",
        b"content-length: 5, 5",
        b"transfer-encoding: chunked",
        b"transfer-encoding: gzip, chunked",
        b"Transfer-Encoding: Chunked",
        b"transfer-encoding: xchunked",
        b"connection: close",
        b"connection: keep-alive",
        b"connection: upgrade",
        b"upgrade: h2c",
        b"expect: 100-continue",
        b"x: \t padded \t",
        b"x: folded\r\n value",
        b"x: bare\nlf: y",
        b"bad name: x",
        b"x : space",
        b"x: nul\0",
        b"x: \xff\xfe",
        b"long: " + b"v" * 300,
        b"",
    ]
)
start = st.sampled_from(
    [
        b"GET / HTTP/1.1",
        b"POST /v1/chat/completions?a=b HTTP/1.1",
        b"HEAD /%7Euser HTTP/1.1",
        b"GET /old HTTP/1.0",
        b"GET http://host/absolute?q HTTP/1.1",
        b"GET / HTTP/1.2",
        b"GET / HTTP/2.0",
        b"CONNECT a:1 HTTP/1.1",
        b"get / HTTP/1.1",
        b"GET /" + b"u" * 300 + b" HTTP/1.1",
        b"",
    ]
)
body = st.sampled_from(
    [
        b"",
        b"hello",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"5;x=y\r\nhello\r\n0\r\nt: v\r\n\r\n",
        b"zz\r\n",
        b"5\nhello\n0\n\n",
    ]
)
request = st.builds(
    lambda first, lines, content: b"\r\n".join([first, b"host: gateway", *lines, b"", content]),
    start,
    st.lists(line, max_size=4),
    body,
)
stream = st.lists(request, min_size=1, max_size=3).map(b"".join) | st.binary(max_size=200)


@settings(max_examples=400, deadline=None)
@given(stream, st.lists(st.integers(0, 4000), max_size=12))
def test_a_request_gives_the_same_events_however_its_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    assert parsed(split(data, cuts)) == parsed([data])


@settings(max_examples=150, deadline=None)
@given(stream)
def test_input_that_arrives_byte_by_byte_gives_the_same_events(data: bytes) -> None:
    assert parsed([data[i : i + 1] for i in range(len(data))]) == parsed([data])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_the_parser_raises_nothing_but_a_refusal_for_random_bytes(data: bytes) -> None:
    _, refusal = parsed([b"POST / HTTP/1.1\r\n" + data])
    assert refusal is None or 400 <= refusal[0] < 500


HEAD = b"POST /x HTTP/1.1\r\nhost: gateway\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        HEAD + b"content-length: 5, 5\r\n\r\nhello",
        HEAD + b"content-length: +5\r\n\r\nhello",
        HEAD + b"content-length: 0x5\r\n\r\nhello",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5 5\r\n\r\nhello",
        HEAD + b"content-length: \r\n\r\n",
        HEAD + b"content-length: 99999999999999999999\r\n\r\n",
        HEAD + b"content-length: " + b"0" * 40 + b"5\r\n\r\nhello",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: identity\r\n\r\n",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding\r\n : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"x: a\r\n folded\r\n\r\n",
        HEAD + b"x: a\n\r\n",
        HEAD + b"x: a\rb: c\r\n\r\n",
        HEAD + b"host: other\r\n\r\n",
        b"POST /x HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/1.1\nhost: gateway\n\n",
        b"POST /x HTTP/1.0\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\nhello\n0\n\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhelloX0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    ],
)
def test_ambiguous_requests_are_refused(sent: bytes) -> None:
    _, refusal = parsed([sent])
    assert refusal == (400, "bad_http")


def test_a_request_to_upgrade_is_served_with_its_body_and_without_the_upgrade() -> None:
    """Some HTTP clients ask for h2c with every request, and llhttp alone would lose the body."""
    sent = (
        b"POST /x HTTP/1.1\r\nhost: a\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\ncontent-length: 5\r\n\r\nhello"
        b"GET /next HTTP/1.1\r\nhost: a\r\n\r\n"
    )
    events, refusal = parsed([sent])
    assert refusal is None
    assert [event for event in events if isinstance(event, bytes)] == [b"hello"]
    assert events.count("complete") == 2
