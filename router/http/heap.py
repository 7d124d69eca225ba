"""Garbage collection of a process that serves streams or places turns: what it takes, all of them wait for.

CPython looks for objects that refer to each other in three generations. The young and the middle one are
small here, and hold the loop for some milliseconds. The old one has whatever lives longer, all conversations
that a gateway knows among it: looking at it took 0.2 and 0.3 s under 100,000 tampered requests. So it is left
to moments in which nothing is under way. What is freed often does not wait for it: a connection that has
closed refers to nothing that refers to it (`RequestParser.close`).
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable

log = logging.getLogger("conserve.router.http")

# Default is 700, which was a sixth of the processor time under a storm of connections; 20,000 takes no less
# than this and holds the loop four times as long.
YOUNG_OBJECTS, YOUNG_PER_MIDDLE = 5_000, 10
NEVER = 2**31 - 1
LOOKS_S = 30.0
AT_LATEST_S = 3600.0


def settle_heap() -> None:
    """Call once when all that lives long is made: it is never looked at again. Needs `collect_when_idle`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PER_MIDDLE, NEVER)


async def collect_when_idle(
    idle: Callable[[], bool], looks_s: float = LOOKS_S, at_latest_s: float = AT_LATEST_S
) -> None:
    """Full collections, where something has become old since the last; one an hour without an idle moment."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(looks_s)
        began, free = time.monotonic(), idle()
        if (free or began - last > at_latest_s) and gc.get_count()[2]:
            found = gc.collect()
            last = time.monotonic()
            say = log.debug if free else log.warning
            say("collected objects=%d held_s=%.3f idle=%s", found, last - began, free)
