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

VLLM_SPINS_S = 1.0  # after that vLLM sleeps until it is notified
SPIN_S = 2e-3  # for this long we spin, too: the answer is near, and a nap would take longer
NAP_SHARE = 0.03  # length of a nap, as a share of the wait so far: a message is found soon after it came
LONGEST_NAP_S = 2e-3


def nap_instead_of_spinning() -> None:
    """Patch this process so that queues between vLLM's processes are polled with short sleeps.

    vLLM's engine core and workers watch shared memory for a second after every message before they sleep.
    On a GPU host that saves a wake-up. Where the model computes on the CPU, the core that spins is taken from
    the model, from the copier and from every other engine of the machine.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    spinning = SpinCondition.wait
    if hasattr(spinning, "__wrapped__"):
        return

    @functools.wraps(spinning)
    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        waited = time.monotonic() - self.last_read
        if SPIN_S < waited < VLLM_SPINS_S:
            # vLLM's notification is no substitute: one before the last is acknowledged would be lost.
            time.sleep(min(NAP_SHARE * waited, LONGEST_NAP_S))
        else:
            spinning(self, timeout_ms)

    SpinCondition.wait = wait


def fork_engine_on_cpu() -> None:
    """Patch this process and its forks: engine processes are forked, and a single worker gets no process.

    vLLM's CPU platform spawns them whatever the environment says, and an only worker, too, which on GPUs runs
    in the engine core's process. Here it does as well, so that no step waits for messages.
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
