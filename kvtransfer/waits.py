"""How an engine's processes wait for one another.

vLLM's engine core and workers watch shared memory for a second after every message before they sleep. On a GPU host
with cores to spare that saves a wake-up; where the model computes on the CPU, the core it burns is taken from the
model, from the copier and from every other engine of the machine.
"""

import functools
import logging

logger = logging.getLogger("conserve.kvtransfer.waits")


def sleep_at_once() -> None:
    """Once a process; its queues may exist already. A notification cannot be missed: it is queued for the reader."""
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
        spinning(self, timeout_ms)

    SpinCondition.wait = wait
