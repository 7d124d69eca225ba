"""Tests of TLS: real clients, faulty handshakes, and certificates that change."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from router.gateway.config import TlsConfig
from router.http import Certificate, RelayEnd, Request, Responder, Server, ServerLimits, TlsError
from tests.router.http.client import HOST, eventually
from tests.router.http.engine import STREAM_HEAD, EngineConnection
from tests.router.http.gateway import RelayingGateway
from tests.support.certificates import Authority
from tests.support.descriptors import no_descriptors
from tests.support.fake_fleet import MODEL, fleet, user

pytestmark = pytest.mark.slow

QUICK = ServerLimits(handshake_timeout_s=0.5)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> tuple[Path, Path]:
    return authority.pair()


@pytest.fixture
async def serve(pair: tuple[Path, Path]) -> AsyncIterator[Any]:
    """Yield a function that starts servers: ``server, port, certificate = await serve(handler, limits)``."""
    servers: list[Server] = []

    async def start(handler: Any, limits: ServerLimits | None = None) -> tuple[Server, int, Certificate]:
        server, certificate = Server(handler, limits), Certificate(*map(str, pair))
        servers.append(server)
        return server, await server.start("127.0.0.1", 0, certificate=certificate), certificate

    yield start
    for server in servers:
        await server.drain(0.2)


async def echo(request: Request, responder: Responder) -> None:
    body = await request.body.read()
    responder.respond(200, body or request.path.encode(), [])


async def connect(port: int, trust: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, ssl=trust)


async def serial(port: int, trust: ssl.SSLContext) -> int:
    _, writer = await connect(port, trust)
    shown = writer.get_extra_info("peercert")["serialNumber"]
    writer.transport.abort()
    return int(shown, 16)


async def test_the_openai_sdk_gets_answers_from_a_gateway_over_tls(
    tmp_path: Path, authority: Authority, pair: tuple[Path, Path]
) -> None:
    cert, key = map(str, pair)
    async with fleet(tmp_path / "fleet") as made:
        plain = made.urls[0]
        sealed = (await made.add_gateway(directory_secret="s3cret", tls=TlsConfig(cert, key))).replace(
            "http://", "https://"
        )

        async def talk(url: str, trust: ssl.SSLContext | bool) -> tuple[str, list[str]]:
            calls = openai.DefaultAsyncHttpxClient(verify=trust)
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="k", http_client=calls, max_retries=0
            ) as api:
                ask: Any = {"model": MODEL, "messages": [user(f"hello {url}")], "max_tokens": 40}
                whole = await api.chat.completions.create(**ask)
                stream = await api.chat.completions.create(**ask, stream=True)
                pieces = [piece.choices[0].delta.content or "" async for piece in stream if piece.choices]
            return whole.choices[0].message.content or "", pieces

        wanted, got = await talk(plain, False), await talk(sealed, authority.trusting())
        assert got == wanted and len("".join(got[1])) > 0
        with pytest.raises(openai.APIConnectionError):
            await talk(sealed, True)  # trusts public authorities only
        page = await _get(sealed, "/metrics", authority)
        assert 'conserve_tls_handshakes_total{outcome="done"} ' in page
        (until,) = (float(one.split()[1]) for one in page.splitlines() if one.startswith("conserve_tls_exp"))
        assert until == Certificate(cert, key).expires.timestamp()


async def _get(url: str, path: str, authority: Authority) -> str:
    async with httpx.AsyncClient(verify=authority.trusting()) as client:
        return (await client.get(url + path)).text


async def test_a_stream_over_tls_is_relayed_completely(
    serve: Any, pool_of: Any, engine_of: Any, authority: Authority
) -> None:
    pieces = [b'{"choices":[{"delta":{"content":"token %d "}}]}' % number for number in range(300)]

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        for piece in pieces:
            await engine.event(piece)
            await asyncio.sleep(0)
        await engine.write(b"0\r\n\r\n")

    _, endpoint = await engine_of(script)
    _, port, _ = await serve(RelayingGateway(pool_of(), endpoint))
    async with httpx.AsyncClient(verify=authority.trusting()) as client:
        got = await client.post(f"https://127.0.0.1:{port}/", content=b"{}")
    assert got.text.split("\n\n")[:-1] == [f"data: {piece.decode()}" for piece in pieces]


async def test_one_tls_connection_carries_a_large_body_and_many_requests(
    serve: Any, authority: Authority
) -> None:
    server, port, _ = await serve(echo)
    body = bytes(range(256)) * (24 << 12)  # 24 MiB
    async with httpx.AsyncClient(verify=authority.trusting(), timeout=60) as client:
        url = f"https://localhost:{port}"
        assert (await client.post(url, content=body)).content == body
        for number in range(20):
            assert (await client.get(f"{url}/{number}")).text == f"/{number}"
        assert server.stats.accepted == 1
        refused = await client.post(url, content=bytes(40 << 20))  # the client gets the refusal, not a reset
        assert refused.status_code == 413


async def test_a_client_that_reads_slowly_gets_a_whole_large_answer_over_tls(
    serve: Any, authority: Authority
) -> None:
    answered = bytes(range(256)) * (32 << 12)

    async def large(request: Request, responder: Responder) -> None:
        responder.close_after()
        responder.respond(200, answered, [])

    _, port, _ = await serve(large)
    reader, writer = await connect(port, authority.trusting())
    writer.write(b"GET / HTTP/1.1\r\n%b\r\n" % HOST)
    await asyncio.sleep(3.0)  # longer than `linger_s`
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"connection: close" in head
    assert await reader.readexactly(len(answered)) == answered
    writer.transport.abort()


@pytest.mark.parametrize("how", ["abort", "close", "vanish"])
async def test_a_tls_client_that_leaves_aborts_the_engines_request(
    serve: Any, pool_of: Any, engine_of: Any, authority: Authority, how: str
) -> None:
    gone = asyncio.Event()

    async def script(engine: EngineConnection) -> None:
        await engine.request()
        await engine.write(STREAM_HEAD)
        await engine.event(b"1")
        try:
            await engine.gone()
        finally:
            gone.set()

    _, endpoint = await engine_of(script)
    gateway = RelayingGateway(pool_of(), endpoint)
    server, port, _ = await serve(gateway)
    reader, writer = await connect(port, authority.trusting())
    writer.write(b"POST / HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n{}" % HOST)
    await reader.readuntil(b"data: 1\n\n")
    if how == "vanish":  # without TLS's close_notify
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as below:
            below.shutdown(socket.SHUT_WR)
    else:
        getattr(writer.transport, how)()
    await asyncio.wait_for(gone.wait(), 10)
    await eventually(lambda: gateway.outcomes)
    assert gateway.outcomes[0].end is RelayEnd.CLIENT_GONE
    await eventually(lambda: server.stats.connections == 0)
    writer.transport.abort()


async def test_an_unfinished_handshake_does_not_delay_other_clients(serve: Any, authority: Authority) -> None:
    server, port, _ = await serve(echo, QUICK)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
    for _, writer in silent[:25]:
        writer.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
    async with asyncio.timeout(0.4), httpx.AsyncClient(verify=authority.trusting()) as client:
        assert (await client.get(f"https://127.0.0.1:{port}/x")).text == "/x"
    assert server.stats.handshakes["done"] == 1 and server.stats.connections <= 1
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    assert server.stats.handshakes["timeout"] == 50


async def test_a_handshake_beyond_the_limit_on_connections_is_refused(
    serve: Any, authority: Authority
) -> None:
    release = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.respond(200, b"late")

    server, port, _ = await serve(slow, ServerLimits(max_connections=3))
    busy = [await connect(port, authority.trusting()) for _ in range(3)]
    for _, writer in busy:
        writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await eventually(lambda: server.stats.requests == 3)
    with pytest.raises(OSError):
        await connect(port, authority.trusting())
    await eventually(lambda: server.stats.handshakes == {"done": 3, "too_many": 1})
    release.set()
    for reader, writer in busy:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


async def test_unfinished_handshakes_are_evicted_for_new_connections(
    serve: Any, authority: Authority
) -> None:
    server, port, _ = await serve(echo, ServerLimits(max_connections=3, handshake_timeout_s=60.0))
    silent = [("127.0.0.2", 0)] * 5  # more than the limit, from one address
    held = [await asyncio.open_connection("127.0.0.1", port, local_addr=one) for one in silent]
    await eventually(lambda: server.stats.handshakes.get("evicted") == 2)
    _, writer = await connect(port, authority.trusting())
    await eventually(lambda: server.stats.handshakes == {"evicted": 3, "done": 1})
    held.append(await asyncio.open_connection("127.0.0.1", port, local_addr=silent[0]))  # the attack goes on
    await eventually(lambda: server.stats.handshakes["evicted"] == 4)
    writer.write(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
    await eventually(lambda: server.stats.requests == 1)
    for one in (writer, *(silent_one for _, silent_one in held)):
        one.transport.abort()
    await eventually(lambda: not server.stats.connections and not server.idle_connections)


async def test_a_client_that_sends_plain_http_is_cut_off_and_counted(serve: Any) -> None:
    server, port, _ = await serve(echo)
    for sent in (b"GET / HTTP/1.1\r\n" + HOST + b"\r\n", b"\x16" * 64):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 5)
        writer.close()
    await eventually(lambda: server.stats.handshakes == {"failed": 2})
    assert server.stats.connections == 0


async def test_tls_before_1_2_is_refused(serve: Any, authority: Authority) -> None:
    server, port, certificate = await serve(echo)
    assert certificate.context.minimum_version is ssl.TLSVersion.TLSv1_2
    old = authority.trusting()
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        await connect(port, old)
    assert server.stats.handshakes == {"failed": 1}
    _, writer = await connect(port, authority.trusting())
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.transport.abort()


async def test_changed_certificate_files_are_used_and_invalid_ones_ignored(
    serve: Any,
    authority: Authority,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.05)
    _, port, certificate = await serve(echo)
    watching = asyncio.create_task(certificate.watch())
    trust, (cert, key) = authority.trusting(), pair
    first = await serial(port, trust)
    reader, writer = await connect(port, trust)
    second = authority.issue(cert, key)
    assert first != second
    until = asyncio.get_running_loop().time() + 10
    while await serial(port, trust) != second:
        assert asyncio.get_running_loop().time() < until
    writer.write(b"GET /old HTTP/1.1\r\n%b\r\n" % HOST)  # on the connection opened before the change
    assert (await reader.readuntil(b"/old")).startswith(b"HTTP/1.1 200")
    writer.transport.abort()
    other = tmp_path / "other.key"
    authority.issue(tmp_path / "other.pem", other)
    with caplog.at_level(logging.ERROR):
        key.write_bytes(other.read_bytes())
        await eventually(lambda: certificate.stale, 10)
    assert "is not the key of" in caplog.text and "stays in use until" in caplog.text
    assert await serial(port, trust) == second
    cert.unlink()
    await asyncio.sleep(0.3)
    assert certificate.stale and await serial(port, trust) == second
    link, released = (
        tmp_path / "live.pem",
        tmp_path / "third.pem",
    )  # certbot and Kubernetes replace files in this way
    third = authority.issue(released, key)
    link.symlink_to(released)
    link.rename(cert)
    await eventually(lambda: not certificate.stale, 10)
    assert await serial(port, trust) == third
    watching.cancel()


async def test_a_renewed_certificate_is_used_once_it_is_readable_and_valid(
    serve: Any, authority: Authority, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.process.LOOK_EVERY_S", 0.05)
    _, port, certificate = await serve(echo)
    before, trust, (cert, key) = certificate.expires, authority.trusting(), pair
    first = await serial(port, trust)
    watching = asyncio.create_task(certificate.watch())
    prepared = authority.pair("renewed")
    with no_descriptors():
        for one, other in zip(prepared, pair, strict=True):
            one.replace(other)
        await eventually(lambda: certificate.stale, 10)
        assert certificate.expires == before
    await eventually(lambda: not certificate.stale, 10)
    second = await serial(port, trust)
    assert second != first
    third = authority.issue(cert, key, begins=timedelta(seconds=63))  # valid three seconds later
    await eventually(lambda: certificate.stale, 10)
    await eventually(lambda: not certificate.stale, 10)
    assert await serial(port, trust) == third
    watching.cancel()


def test_a_key_that_belongs_to_another_certificate_is_refused(authority: Authority, tmp_path: Path) -> None:
    cert, _ = authority.pair("one")
    _, key = authority.pair("two")
    with pytest.raises(TlsError, match=r"two\.key is not the key of the first certificate in .*one\.pem"):
        Certificate(str(cert), str(key))


async def test_an_error_of_a_handler_is_answered_over_tls(serve: Any, authority: Authority) -> None:
    _, port, _ = await serve(echo)
    reader, writer = await connect(port, authority.trusting())
    writer.write(b"GET / HTTP/1.1\r\n\r\n")  # without Host
    got = await asyncio.wait_for(reader.read(), 10)
    assert got.startswith(b"HTTP/1.1 400") and orjson.loads(got.partition(b"\r\n\r\n")[2])["error"]
    writer.transport.abort()
