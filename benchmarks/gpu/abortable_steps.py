"""Decode steps with the product's safepoint. Everything that depends on its interface is in this file."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.decode_layers import DecodeLayers, LayerHook
from workers.engine.coserving.safepoint import (
    RUN_AHEAD,
    Armed,
    Flag,
    LayerFence,
    SafepointAbort,
    SafepointWorker,
)


@dataclass(frozen=True)
class StepTimes:
    host_s: float  # until everything is launched
    step_s: float  # until the device is done
    since_signal_s: float = 0.0  # from the signal until the device is done
    aborted: bool = False


def timed(launch: Callable[[], object], finish: Callable[[], object]) -> StepTimes:
    began = time.perf_counter()
    launch()
    launched = time.perf_counter()
    finish()
    return StepTimes(launched - began, time.perf_counter() - began)


class InstantEvent:
    """Replacement for a CUDA event on a CPU, where work is done when its call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def fence_hooks(device: str, ahead: int) -> tuple[LayerHook, LayerHook]:
    """Return the hooks before and after each layer of a step in pieces: only a fence, without a flag."""
    event: Callable[[], Any] = torch.cuda.Event if device == "cuda" else InstantEvent
    fence = LayerFence(event)

    def before(layer: int) -> None:
        if layer == 0:
            fence.begin(ahead)
        fence.wait()

    return before, lambda layer: fence.passed()


class AbortableSteps:
    """Steps in pieces with the safepoint's hooks, armed or not."""

    def __init__(self, device: str, layers: DecodeLayers, flag: Flag) -> None:
        self._layers, self._flag, self._epoch = layers, flag, 0
        self._names = [f"layer{n}" for n in range(layers.layers)]
        self._worker = SafepointWorker(flag, 1, 0, 1, RUN_AHEAD)
        self._worker.register({name: torch.empty(1, device=device) for name in self._names})

    def step(self, armed: bool = True, leave_at: int | None = None, *, wait: bool = True) -> StepTimes:
        """Run a step. The signal to leave before a layer comes just after the previous layer's check."""
        self._epoch += 1
        signalled_at = 0.0

        def before(layer: int) -> None:
            nonlocal signalled_at
            if layer >= 0:
                self._worker.before_layer(self._names[layer])
            if leave_at is not None and layer == leave_at - 1:
                signalled_at = time.perf_counter()
                self._flag.raise_for(self._epoch)

        self._worker.before_step(Armed(self._epoch) if armed else None)
        began, aborted = time.perf_counter(), False
        before(-1)
        try:
            self._layers.step_in_pieces(before, lambda n: self._worker.after_layer(self._names[n]))
        except SafepointAbort:
            aborted = True
        launched = time.perf_counter()
        if wait:
            self._layers.finish()
        self._worker.after_step()
        ended = time.perf_counter()
        return StepTimes(launched - began, ended - began, ended - signalled_at, aborted)


@contextmanager
def abortable_steps(device: str, layers: DecodeLayers) -> Iterator[AbortableSteps]:
    flag = Flag(f"conserve-gpu-{os.getpid()}")
    try:
        yield AbortableSteps(device, layers, flag)
    finally:
        flag.remove()
