"""Waiting for a condition in tests, with a limit that is long enough for a busy machine."""

import asyncio
from collections.abc import Callable

LIMIT_S = 60.0


async def until(true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def let_the_loop_turn() -> None:
    """Let the event loop deliver the bytes that were written to the other end of a socket.

    One long sleep is not enough: after a stall its timer fires before the sockets are read.
    """
    for _ in range(25):
        await asyncio.sleep(0.001)
