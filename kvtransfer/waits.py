"""How an engine's processes wait for one another.

vLLM's engine core and workers watch shared memory for a second after every message before they sleep. On a GPU host
with cores to spare that saves a wake-up; where the model computes on the CPU, the core it burns is taken from the
model, from the copier and from every other engine of the machine.
"""

import functools
import logging
import time

logger = logging.getLogger("conserve.kvtransfer.waits")

# Notifications of a burst get lost (the socket holds one, and drops what comes before that is acknowledged), so
# that a reader looks again after this long at the latest.
NAP_MS = 2
IN_USE_S = 1.0  # as long as vLLM would spin; after that it sleeps, and looks every five seconds


def sleep_at_once() -> None:
    """In this process, from now on: also for queues that exist already."""
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
        self.busy_loop_s = 0.0
        if time.monotonic() <= self.last_read + IN_USE_S:
            timeout_ms = NAP_MS if timeout_ms is None else min(timeout_ms, NAP_MS)
        spinning(self, timeout_ms)

    SpinCondition.wait = wait
