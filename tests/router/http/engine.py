"""Test engine that writes exactly the bytes that a test's script tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class EngineConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    number: int
    requests: list[bytes] = field(default_factory=list)

    async def request(self) -> bytes:
        """Read the next request with its head and its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        request = head + await self.reader.readexactly(length)
        self.requests.append(request)
        return request

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, text: bytes) -> None:
        await self.chunk(b"data: " + text + b"\n\n")

    def reset(self) -> None:
        """Reset the connection, as a killed process does."""
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the gateway has closed the connection."""
        while await self.reader.read(65536):
            pass


Script = Callable[[EngineConnection], Awaitable[None]]


class ScriptedEngine:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.connections: list[EngineConnection] = []
        self.aborted = asyncio.Event()
        """A connection was lost while its script ran."""

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def requests(self) -> list[bytes]:
        return [request for connection in self.connections for request in connection.requests]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = EngineConnection(reader, writer, len(self.connections))
        self.connections.append(connection)
        try:
            await self._script(connection)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.aborted.set()
        finally:
            writer.close()

    async def stop(self) -> None:
        self._server.close()
        for connection in self.connections:
            connection.writer.transport.abort()


def answer(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status,
        headers,
        len(body),
        body,
    )
