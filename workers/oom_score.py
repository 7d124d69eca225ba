"""Which process of a fleet the kernel ends first when the machine's memory runs out.

Without a say the kernel takes the largest, and Ray's own monitor takes actors, whoever took the memory: the
directory and all keepers went, and the engine that had grown stayed. Engines can be started again; without
the directory and the gateways nothing is served at all.
"""

from contextlib import suppress
from enum import IntEnum
from pathlib import Path

SCORE_FILE = Path("/proc/self/oom_score_adj")
_HIGHEST = 1000


class OomScore(IntEnum):
    """Thousandths of the machine's memory that count on top of what a process has."""

    SERVING = 0  # the directory, gateways
    BATCH = 100
    KEEPER = 200
    ENGINE = 800


def set_oom_score(score: int) -> None:
    """Set it for this process and those that it starts from now on. Where its container or session was given
    a score that it may not go below, a process adds `score` to what it has: the order stays. A system that
    lets nobody say it is no reason not to start."""
    with suppress(OSError):
        given = int(SCORE_FILE.read_text())
        try:
            SCORE_FILE.write_text("0")
        except PermissionError:
            score = min(_HIGHEST, given + score)
        SCORE_FILE.write_text(str(score))
