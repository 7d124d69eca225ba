"""Asynchronous scheduling on vLLM's CPU build, which vLLM itself turns off there.

    with overlapping():
        async with coserving_engine(replace(shape, arguments={"worker_cls": WORKER}), config): ...

The scheduler schedules each step before it takes the result of the previous step, and the runner finds the
sampled tokens where a GPU's runner finds them. But no device works in the meantime.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform

from workers.engine.engine_worker import EngineWorker

WORKER = "benchmarks.harness.cpu_overlap.OverlappingCpuWorker"


@contextmanager
def overlapping() -> Iterator[None]:
    """Allow asynchronous scheduling for engines that are configured within this block and ask for it."""
    updating = CpuPlatform.check_and_update_config

    @functools.wraps(updating)
    def check_and_update_config(vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        updating(vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(check_and_update_config)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = updating


class DoneEvent:
    """Stands in for a CUDA event that completes when it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class IdleStream:
    """Stands in for a CUDA stream: has no work, so that nothing waits for it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


def replace_cuda(event: type = DoneEvent) -> None:
    """Install stand-ins for the CUDA streams and events that vLLM's runner uses to copy sampled tokens."""
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = event, IdleStream
    cuda.current_stream = IdleStream
    cuda.stream = lambda stream: nullcontext()


class OverlappingCpuWorker(EngineWorker):
    """CPU worker with stand-ins for the CUDA streams and events that asynchronous scheduling needs."""

    def init_device(self) -> None:
        replace_cuda()
        super().init_device()
