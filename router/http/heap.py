"""The garbage collector, set for a process that makes and drops many small objects."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000


def settle_heap() -> None:
    """Call once when all that lives long is made.

    What exists now is never looked at again, and a young collection comes after tens of thousands of objects
    instead of hundreds: a connection is freed by a collection (it and its parser refer to each other), and
    looking for it every few requests was a sixth of the processor time under a storm of connections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 20)
