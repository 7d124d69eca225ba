"""Patches of vLLM's CPU build: short sleeps instead of spinning, and forked processes."""

import functools
import os
import time
from typing import Any

from kvtransfer.compat.relied_on import ReliedOn

_SPIN = "vllm.distributed.device_communicators.shm_broadcast:SpinCondition"
_CPU = "vllm.platforms.cpu:CpuPlatform"

SPINNING = ReliedOn(
    signatures={_SPIN: {"wait": ("self", "timeout_ms")}},
    attributes={_SPIN: ("last_read", "busy_loop_s")},
    uses={_SPIN: {"wait": ("last_read", "busy_loop_s")}},
)
STARTING = ReliedOn(signatures={_CPU: {"check_and_update_config": ("vllm_config",)}}, attributes={})

VLLM_SPINS_S = 1.0  # time of spinning after which vLLM sleeps until it is notified
SPIN_S = 2e-3  # time in which vLLM may spin here too, because a nap could be longer than the wait
NAP_SHARE = 0.03  # length of a nap as a share of the wait so far, so that a message is found soon
LONGEST_NAP_S = 2e-3


def nap_instead_of_spinning() -> None:
    """Patch this process so that queues between vLLM's processes are polled with short sleeps.

    vLLM's engine core and workers spin on shared memory for a second after every message before they sleep.
    On a GPU host this saves a wake-up. On a CPU host a process that spins takes a core from the model, from
    the copier and from every other engine of the machine.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning = SpinCondition.wait
    if hasattr(spinning, "__wrapped__"):
        return

    @functools.wraps(spinning)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        waited = time.monotonic() - self.last_read
        if SPIN_S < waited < VLLM_SPINS_S:
            # Do not wait for vLLM's notification: it is lost if it comes before the last is acknowledged.
            time.sleep(min(NAP_SHARE * waited, LONGEST_NAP_S))
        else:
            spinning(self, timeout_ms)

    SpinCondition.wait = wait


def fork_engine_on_cpu() -> None:
    """Patch this process and its forks: they fork engine processes, and start none for a single worker.

    vLLM's CPU platform spawns processes whatever the environment says, even for a single worker. With this
    patch a single worker runs in the engine core's process, as on GPUs, so that no iteration waits for
    messages.
    """
    from vllm.platforms.cpu import CpuPlatform

    updating = CpuPlatform.check_and_update_config

    @functools.wraps(updating)
    def check_and_update_config(vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        executor = parallel.distributed_executor_backend  # vLLM's own choice for one rank, or the user's
        updating(vllm_config)
        parallel.distributed_executor_backend = executor
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
