"""Order in which the kernel kills a fleet's processes when the machine runs out of memory.

By default the kernel kills the largest process and Ray's monitor kills actors, whichever process took the
memory. Then the directory and all keepers may end while the engine that grew stays. The scores make an engine
the first to be killed: it can be started again, but without the directory and the gateways nothing is served.
"""

from contextlib import suppress
from enum import IntEnum
from pathlib import Path

SCORE_FILE = Path("/proc/self/oom_score_adj")
_HIGHEST = 1000


class OomScore(IntEnum):
    """Value that the kernel adds to a process's own score, in thousandths of the machine's memory."""

    SERVING = 0  # the directory, gateways
    BATCH = 100
    KEEPER = 200
    ENGINE = 800
    GRAMMARS = 1000


def set_oom_score(score: int) -> None:
    """Set the score of this process and of processes that it starts later.

    If the process may not go below its container's score, `score` is added to the container's, which keeps
    the order. If the system forbids scores altogether, nothing happens.
    """
    with suppress(OSError):
        given = int(SCORE_FILE.read_text())
        try:
            SCORE_FILE.write_text("0")
        except PermissionError:
            score = min(_HIGHEST, given + score)
        SCORE_FILE.write_text(str(score))
