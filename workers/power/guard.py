"""python -m workers.power.guard RECORD HOLDER GRACE_S: sets limits back when their keeper is gone.

Its standard input is a pipe from the keeper. The end of it means that the keeper ended, however it ended.
After the grace it sets back what that keeper still answers for; a restarted one has put its own name there.
"""

import logging
import os
import sys
import time
from pathlib import Path

from workers.power.caps import restore
from workers.power.nvml import Gpus, PowerError
from workers.power.record import boot_id, read

log = logging.getLogger("conserve.workers.power")


def main(path: Path, holder: str, grace_s: float) -> int:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    end = time.monotonic() + grace_s
    while any(entry.holder == holder for entry in read(path, boot_id()).values()):
        left = end - time.monotonic()
        if left <= 0.0:
            return _restore(path, holder)
        time.sleep(min(0.5, left))
    return 0


def _restore(path: Path, holder: str) -> int:
    try:
        with Gpus() as gpus:
            outcomes = restore(gpus, path, boot_id(), holder=holder)
    except PowerError as error:
        log.error("power limits not set back, do it with conserve power restore reason=%r", str(error))
        return 1
    for outcome in outcomes:
        log.warning(
            "keeper gone, its power limits set back owner=%s gpu=%s done=%r",
            outcome.owner,
            outcome.gpu,
            outcome.text,
        )
    return 0 if all(outcome.done for outcome in outcomes) else 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
