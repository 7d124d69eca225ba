"""Virtual time and seeded randomness for a whole operating-system process.

Call `install` before the first import of the product: many of its modules take `time.monotonic` as the
default value of a parameter, and would keep the real clock.
"""

import gc
import os
import random
import time
from collections.abc import Callable

START_S = 1_800_000_000.0  # the virtual wall clock at virtual second 0

_sources: list[Callable[[], float]] = [time.monotonic]  # the last one is the clock
_entropy = random.Random(0)


def now() -> float:
    return _sources[-1]()


def install() -> None:
    """Replace the clocks and random sources of this process."""

    def wall() -> float:
        return START_S + now()

    def urandom(size: int) -> bytes:
        return _entropy.randbytes(size)

    time.monotonic = time.perf_counter = now
    time.time = wall
    time.time_ns = lambda: int(wall() * 1e9)
    time.monotonic_ns = lambda: int(now() * 1e9)
    time.clock_gettime = lambda clock: wall()
    time.sleep = lambda seconds: None
    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined]  # behind `secrets` and SystemRandom
    gc.disable()  # finalizers run at moments that no seed decides


def begin(source: Callable[[], float], seed: int) -> None:
    """Make the clocks show what `source` returns, and restart the sequence of random bytes."""
    _sources.append(source)
    _entropy.seed(seed)
    random.seed(seed)


def end() -> None:
    """Let the clocks show what they showed before `begin`."""
    _sources.pop()
