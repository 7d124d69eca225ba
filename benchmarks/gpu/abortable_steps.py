"""Decode steps that the product's safepoint can abort: the only GPU benchmark that calls its interface."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.gpu.decode_layers import DecodeLayers
from workers.engine.coserving.safepoint import RUN_AHEAD, Armed, Flag, SafepointAbort, SafepointWorker


@dataclass(frozen=True)
class StepTimes:
    step_s: float  # until the device is done
    since_signal_s: float  # from the signal until the device is done
    aborted: bool


class AbortableSteps:
    """Decode steps in graph pieces that call the safepoint's hooks between layers."""

    def __init__(self, device: str, layers: DecodeLayers, flag: Flag) -> None:
        self._layers, self._flag, self._epoch = layers, flag, 0
        self._names = [f"layer{n}" for n in range(layers.layers)]
        self._worker = SafepointWorker(flag, 1, 0, 1, RUN_AHEAD)
        self._worker.register({name: torch.empty(1, device=device) for name in self._names})

    def step(self, armed: bool = True, leave_at: int | None = None) -> StepTimes:
        """Run a step. With `leave_at`, signal an abort just after the check before layer `leave_at - 1`."""
        self._epoch += 1
        signalled_at = 0.0

        def before(layer: int) -> None:
            nonlocal signalled_at
            self._worker.before_layer(self._names[layer])
            if leave_at is not None and layer == leave_at - 1:
                signalled_at = time.perf_counter()
                self._flag.raise_for(self._epoch)

        self._worker.before_step(Armed(self._epoch) if armed else None)
        began, aborted = time.perf_counter(), False
        try:
            self._layers.step_in_pieces(before, lambda n: self._worker.after_layer(self._names[n]))
        except SafepointAbort:
            aborted = True
        self._layers.finish()
        self._worker.after_step()
        ended = time.perf_counter()
        return StepTimes(ended - began, ended - signalled_at, aborted)


@contextmanager
def abortable_steps(device: str, layers: DecodeLayers) -> Iterator[AbortableSteps]:
    flag = Flag(f"conserve-gpu-{os.getpid()}")
    try:
        yield AbortableSteps(device, layers, flag)
    finally:
        flag.remove()
