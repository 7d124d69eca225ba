"""Tests of draining: a shutdown loses no running answer."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from typing import Any

from router.http import Request, Responder
from tests.router.http.client import Client, eventually
from tests.support.waiting import let_the_loop_turn

SERVER = textwrap.dedent(
    """
    import asyncio, sys, uvloop
    from router.http import Server

    async def handle(request, responder):
        responder.start(200, [(b"content-type", b"text/event-stream")])
        for n in range(int(request.query)):
            responder.write(b"data: %d\\n\\n" % n)
            await asyncio.sleep(0.05)
        responder.finish()

    async def main():
        server = Server(handle)
        print(await server.start("127.0.0.1", 0), flush=True)
        print(await server.run_until_signal(float(sys.argv[1])), flush=True)

    uvloop.run(main())
    """
)


async def spawned(drain_s: float) -> tuple[asyncio.subprocess.Process, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SERVER,
        str(drain_s),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    return process, int(await asyncio.wait_for(process.stdout.readline(), 60))


async def test_sigterm_lets_running_streams_end() -> None:
    process, port = await spawned(10)
    assert process.stdout is not None
    async with await Client.connect(port) as busy, await Client.connect(port) as idle:
        busy.ask(b"/?10")
        await busy.head()
        await busy.chunk()
        process.send_signal(signal.SIGTERM)
        assert await idle.rest() == b""
        assert (await busy.chunks())[-1] == b"data: 9\n\n"
        assert await busy.rest() == b""
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"True\n"
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_drain_ends_within_its_limit() -> None:
    process, port = await spawned(0.5)
    assert process.stdout is not None
    async with await Client.connect(port) as client:
        client.ask(b"/?1000")
        await client.head()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"False\n"
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_second_signal_cuts_the_drain_short() -> None:
    process, port = await spawned(60)
    async with await Client.connect(port) as client, await Client.connect(port) as idle:
        client.ask(b"/?1000")
        await client.head()
        process.send_signal(signal.SIGTERM)
        assert await idle.rest() == b""  # signals that come together count as one
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_new_requests_are_refused_during_a_drain(serve: Any) -> None:
    came, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        came.set()
        await go_on.wait()
        responder.respond(200, b"done")

    server, port = await serve(slow)
    async with await Client.connect(port) as client:
        client.ask()
        await eventually(came.is_set)
        draining = asyncio.create_task(server.drain(60))
        await let_the_loop_turn()
        go_on.set()
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"done", "close")
    assert await draining
