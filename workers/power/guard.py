"""python -m workers.power.guard RECORD HOLDER GRACE_S: sets limits back when their keeper is gone.

Its standard input is a pipe from the keeper. The end of it means that the keeper ended, however it ended.
After the grace it sets back what that keeper still answers for; a restarted one has put its own name there.
SIGTERM, as `conserve down` sends it to keeper and guard alike, means that nobody restarts it: no grace then.
"""

import logging
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from workers.power.limits import boot_id, read_record, set_back
from workers.processes import WorkerError

KEEPER_ENDS_S = 8.0  # less than what whoever ends us waits before it kills us


class Told(WorkerError):
    """Somebody ends this process."""


def main(path: Path, holder: str, grace_s: float) -> int:
    signal.signal(signal.SIGTERM, _told)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # held back since before it could be met
        _until_keeper_is_gone()
        if _somebody_else_answers(path, holder, grace_s):
            return 0
    except Told:
        _until_keeper_is_gone(KEEPER_ENDS_S)  # while it lives it would set its cap again
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 0 if set_back(path, holder) else 1


def _told(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Told


def _until_keeper_is_gone(limit_s: float | None = None) -> None:
    pipe = sys.stdin.fileno()
    while select.select([pipe], [], [], limit_s)[0] and os.read(pipe, 1024):
        pass


def _somebody_else_answers(path: Path, holder: str, grace_s: float) -> bool:
    """For what this keeper had set, within the grace; or nothing is left to answer for."""
    end = time.monotonic() + grace_s
    while any(entry.holder == holder for entry in read_record(path, boot_id()).entries.values()):
        left = end - time.monotonic()
        if left <= 0.0:
            return False
        time.sleep(min(0.5, left))
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
