"""How an engine's processes wait for one another.

vLLM's engine core and workers watch shared memory for a second after every message before they sleep. On a
GPU host with cores to spare that saves a wake-up; where the model computes on the CPU, the core it burns is
taken from the model, from the copier and from every other engine of the machine.
"""

import functools
import logging
import time

logger = logging.getLogger("conserve.kvtransfer.waits")

IN_USE_S = 1.0  # as long as vLLM spins; after that it sleeps until it is notified
SPIN_S = 2e-3  # the other side is about to answer, and a nap would take longer
SHARE = 0.03  # of the wait so far a nap lasts: what a message lies there is short beside what it took to come
LONGEST_S = 2e-3


def nap() -> None:
    """In this process, from now on: also at queues that exist already."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

        spinning = SpinCondition.wait
    except (ImportError, AttributeError):
        logger.warning("this vLLM waits in a way not known here: its idle processes may take a core each")
        return
    if hasattr(spinning, "__wrapped__"):
        return

    @functools.wraps(spinning)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        waited = time.monotonic() - self.last_read
        if SPIN_S < waited < IN_USE_S:
            # Not vLLM's notification: one that comes before the last is acknowledged is lost.
            time.sleep(min(SHARE * waited, LONGEST_S))
        else:
            spinning(self, timeout_ms)

    SpinCondition.wait = wait
