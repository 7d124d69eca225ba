"""Test client that shows exactly the bytes that arrive on its socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Self

HOST = b"host: gateway\r\n"
LIMIT_S = 60.0


async def eventually(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until ``condition`` returns a true value."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class HttpAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    chunked: bool

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Self:
        if receive_buffer is None:
            return cls(*await asyncio.open_connection("127.0.0.1", port))
        import socket

        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=receive_buffer))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        self.writer.transport.abort()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def ask(self, path: bytes = b"/", body: bytes | None = None, headers: bytes = b"") -> None:
        """Send a GET request without a body, or a POST request with ``body``."""
        if body is None:
            self.send(b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path, HOST, headers))
        else:
            length = b"content-length: %d\r\n" % len(body)
            self.send(b"POST %b HTTP/1.1\r\n%b%b%b\r\n%b" % (path, HOST, length, headers, body))

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_S)
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        return int(status), {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }

    async def chunk(self) -> bytes:
        """Return the content of the next chunk; the last chunk is empty."""
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), LIMIT_S), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), LIMIT_S)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def chunks(self) -> list[bytes]:
        found: list[bytes] = []
        while piece := await self.chunk():
            found.append(piece)
        return found

    async def answer(self, *, head_only: bool = False) -> HttpAnswer:
        status, headers = await self.head()
        chunked = headers.get("transfer-encoding") == "chunked"
        if head_only or status in (204, 304):
            body = b""
        elif chunked:
            body = b"".join(await self.chunks())
        elif "content-length" in headers:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), LIMIT_S)
        else:
            body = await self.rest()
        return HttpAnswer(status, headers, body, chunked)

    async def rest(self, limit_s: float = LIMIT_S) -> bytes:
        """Read everything until the server closes the connection."""
        return await asyncio.wait_for(self.reader.read(-1), limit_s)
