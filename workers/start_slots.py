"""At most so many engines of a host start at once: a start takes all cores, and a slow one looks failed."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LOOK_EVERY_S = 0.2


@asynccontextmanager
async def start_slot(directory: Path, slots: int | None) -> AsyncIterator[None]:
    """Hold one of `slots` file locks in `directory` (None: no limit). A holder that dies frees its slot."""
    if slots is None:
        yield
        return
    held = await _acquire(directory, slots)
    try:
        yield
    finally:
        os.close(held)


async def _acquire(directory: Path, slots: int) -> int:
    while True:
        for number in range(slots):
            file = os.open(directory / f"start-{number}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                return file
        await asyncio.sleep(LOOK_EVERY_S)
