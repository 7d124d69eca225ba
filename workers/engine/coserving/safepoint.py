"""Safepoint: connector plugin that checks the abort flag between layers and can end the forward pass.

vLLM calls the connector before the attention of every layer, in eager and compiled models. It cannot in a
whole CUDA graph, so an armed iteration never runs as one. At such a call the forward pass can end: no layer
is incomplete, and the roll-back undoes what was written.

Tensor parallel ranks must end at the same layer, or some wait in a collective for ever. Rank 0 chooses
a layer so far ahead that no rank can have passed it. This is possible because every layer has a collective
that no rank leaves before rank 0 enters it, and because a host runs only a limited number of layers ahead of
its device (`Armed.run_ahead`).
"""

import math
import mmap
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.plugins import EngineContext, Plugin, SchedulerSide, WorkerSide
from workers.engine.coserving.config import CoServingConfig, CoServingConfigError
from workers.engine.coserving.iterations import COUNTERS, HISTOGRAMS
from workers.engine.forward_ended import ForwardEnded

_FIELDS = 16
_LAYER_BITS = 12

RAISED = 0  # epoch of the iteration to abort
RAISED_NS = 1
DECIDED = 2  # rank 0's decision: epoch and layer in one number, which is read as a whole
RUNNING = 3  # epoch of the armed iteration in the model now; 0: none
ABORTED = 4  # epoch of the last aborted iteration
ABORTED_NS = 5
ABORTED_LAYER = 6
ABORTS = 7  # number of aborted iterations
GAP_NS = 8  # at the last abort: time since the previous check


def new_epoch() -> int:
    """Return the first epoch of an engine, above all epochs that a crashed engine left in shared memory."""
    return time.time_ns() >> 20


def pack(epoch: int, layer: int) -> int:
    return epoch << _LAYER_BITS | layer


def unpack(decision: int) -> tuple[int, int]:
    return decision >> _LAYER_BITS, decision & ((1 << _LAYER_BITS) - 1)


class Flag:
    """Abort flag: a page of shared memory between an engine's scheduler process and its workers.

    Every armed iteration has an epoch, and raising the flag writes the epoch to abort. The flag needs no
    reset, because a late signal has the epoch of an iteration that is over. Fields are aligned eight-byte
    integers, so that each is read and written as a whole.
    """

    def __init__(self, name: str) -> None:
        self.path = Path("/dev/shm") / name
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _FIELDS * 8)
            self._map = mmap.mmap(handle, _FIELDS * 8)
        finally:
            os.close(handle)
        self.fields = memoryview(self._map).cast("q")

    def raise_for(self, epoch: int) -> None:
        """Ask the workers to abort the iteration with this epoch, if it still runs."""
        self.fields[RAISED_NS] = time.monotonic_ns()
        self.fields[RAISED] = epoch

    def aborted(self, epoch: int) -> bool:
        return self.fields[ABORTED] == epoch

    def abort_wait_s(self) -> float:
        """Return the time from the last abort's signal to the safepoint that noticed it."""
        return max(self.fields[ABORTED_NS] - self.fields[RAISED_NS], 0) / 1e9

    def close(self) -> None:
        self.fields.release()
        self._map.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


NAME = "safepoint"
# Least layers, and least predicted time, that a host may run ahead of its device in armed iterations, so that
# the device does not idle when the host loses Python's lock for a moment.
RUN_AHEAD, RUN_AHEAD_S = 2, 1e-3


class SafepointAbort(ForwardEnded):
    """Signal with which a safepoint ends the forward pass of an armed iteration."""


@dataclass(frozen=True, slots=True)
class Armed:
    """Order that arms an iteration, from the scheduler to the workers."""

    epoch: int
    run_ahead: int = 0  # layers that the host may run ahead; the worker's own bound counts if it is higher


def run_ahead_of(seconds: float, layers: int) -> int:
    """Return how many layers the host may run ahead in an iteration that is predicted to take `seconds`."""
    wanted = math.ceil(RUN_AHEAD_S * layers / seconds) if seconds > 0 else layers
    return max(RUN_AHEAD, min(wanted, layers // 2))


class SafepointScheduler(SchedulerSide):
    """Scheduler side, which arms iterations that are worth aborting, each with its own epoch."""

    def __init__(
        self, flag: Flag, enabled: bool, kv_io_suspended: Callable[[], bool] = lambda: False, layers: int = 0
    ) -> None:
        """Create the scheduler side. `layers` is 0 unless the host runs ahead of the device."""
        self.flag = flag
        self._enabled = enabled
        self._kv_io_suspended = kv_io_suspended  # True: peers compute parts of a pass, or are about to
        self._layers = layers
        # Returns the predicted time of the iteration being scheduled, or 0 if it is not worth arming. The
        # scheduler sets it.
        self.worth_arming: Callable[[], float] = lambda: 0.0
        # The engine's scheduler counts here too (iterations.py).
        self.counts: Counter[str] = Counter()
        self.observations: defaultdict[str, list[float]] = defaultdict(list)
        self._epoch = new_epoch()
        self.armed = 0  # epoch of the last iteration, 0 if it is not armed

    @property
    def arms(self) -> bool:
        """Return whether iterations can be armed now."""
        return self._enabled and not self._kv_io_suspended()

    def order(self, scheduler_output: Any) -> Armed | None:
        self.armed = 0
        # An iteration with a synchronous load is not armed: it counts tokens whose KV comes layer by layer.
        if not self.arms or scheduler_output.has_sync_kv_loads or not scheduler_output.num_scheduled_tokens:
            return None
        seconds = self.worth_arming()
        if not seconds:
            return None
        self._epoch = self.armed = self._epoch + 1
        return Armed(self._epoch, run_ahead_of(seconds, self._layers) if self._layers else 0)

    def take_counts(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        observations, self.observations = self.observations, defaultdict(list)
        return observations

    def shutdown(self) -> None:
        self.flag.remove()


class SafepointWorker(WorkerSide):
    """Worker side on one rank, which checks the flag before layers of an armed iteration."""

    def __init__(self, flag: Flag, every: int, rank: int, ranks: int, run_ahead: int) -> None:
        self._flag = flag
        self._fields = flag.fields
        self._every = every
        self._decides = rank == 0
        self._agree = ranks > 1
        self._lead = 1  # layers between rank 0's decision and the layer it is for
        self._epoch = 0
        self._at = 0  # layers entered in this iteration
        self._checked_ns = 0
        self._fence: LayerFence | None = None
        self._run_ahead = run_ahead  # least layers that the host may run ahead

    def register(self, kv_caches: Any) -> None:
        tensor = next(iter(kv_caches.values()))
        if tensor.device.type == "cuda":
            import torch

            self._fence = LayerFence(torch.cuda.Event)

    def before_step(self, order: Armed | None) -> None:
        self._epoch = order.epoch if order is not None else 0
        self._at = 0
        if order is not None:
            run_ahead = max(self._run_ahead, order.run_ahead)
            self._lead = 1 + run_ahead
            if self._fence is not None:
                self._fence.begin(run_ahead)
        self._checked_ns = time.monotonic_ns()
        if self._decides:
            self._fields[RUNNING] = self._epoch

    def needs_layers(self, order: Armed | None) -> bool:
        return order is not None

    def before_layer(self, layer: str) -> None:
        epoch = self._epoch
        if not epoch:
            return
        # Layers are counted, because vLLM registers them by KV cache group and not in the model's order.
        index = self._at
        if index % self._every == 0:
            if self._fence is not None:
                self._fence.wait()
            if self._agree:
                self._check_agreed(epoch, index)
            elif self._fields[RAISED] == epoch:
                self._abort(epoch, index)
            self._checked_ns = time.monotonic_ns()
        self._at = index + 1

    def after_layer(self, layer: str) -> None:
        if self._epoch and self._fence is not None:
            self._fence.passed()

    def after_step(self) -> None:
        self._epoch = 0
        if self._decides:
            self._fields[RUNNING] = 0

    def shutdown(self) -> None:
        self._fields = memoryview(bytearray(len(self._fields) * 8)).cast("q")
        self._flag.close()

    def _check_agreed(self, epoch: int, index: int) -> None:
        decided_epoch, layer = unpack(self._fields[DECIDED])
        if decided_epoch == epoch:
            if index >= layer:
                self._abort(epoch, index)
        elif self._decides and self._fields[RAISED] == epoch:
            self._fields[DECIDED] = pack(epoch, index + self._lead)

    def _abort(self, epoch: int, index: int) -> None:
        if self._decides:
            now = time.monotonic_ns()
            self._fields[GAP_NS] = now - self._checked_ns
            self._fields[ABORTED_NS] = now
            self._fields[ABORTED_LAYER] = index
            self._fields[ABORTS] += 1
            self._fields[ABORTED] = epoch
        raise SafepointAbort


class LayerFence:
    """Limit on how many layers the host queues ahead of a CUDA device.

    Without it the host would pass all layers before the device has computed the first, too early to abort.
    """

    def __init__(self, event: Callable[[], Any]) -> None:
        self._event = event
        self._ahead = 1
        self._queued: deque[Any] = deque()  # one event per layer that may still run, oldest first
        self._spare: list[Any] = []

    def begin(self, ahead: int) -> None:
        """Begin an iteration in which at most `ahead` layers may be queued."""
        self._ahead = ahead
        self._spare += self._queued
        self._queued.clear()

    def passed(self) -> None:
        """Record a CUDA event after the last queued layer."""
        event = self._spare.pop() if self._spare else self._event()
        event.record()
        self._queued.append(event)

    def wait(self) -> None:
        """Wait until fewer than `ahead` layers are queued."""
        over = len(self._queued) - self._ahead
        if over >= 0:
            self._queued[over].synchronize()
            self._spare += (self._queued.popleft() for _ in range(over + 1))


class SafepointPlugin(Plugin):
    """Plugin that adds safepoints to the connector."""

    name = NAME
    counters = COUNTERS
    histograms = HISTOGRAMS

    def scheduler_side(self, context: EngineContext) -> SafepointScheduler:
        config = CoServingConfig.from_additional_config(context.vllm_config.additional_config)
        enabled = config.serving.safepoints and config.serving.policy == "conserve"
        layers = sum(len(group.layers) for group in context.groups) if _on_cuda(context) else 0
        return SafepointScheduler(_flag(context), enabled, lambda: context.kv_state.kv_io_suspended, layers)

    def worker_side(self, context: EngineContext, rank: int) -> SafepointWorker:
        config = CoServingConfig.from_additional_config(context.vllm_config.additional_config)
        ranks = context.vllm_config.parallel_config.tensor_parallel_size
        run_ahead = RUN_AHEAD if _on_cuda(context) else 0
        return SafepointWorker(_flag(context), config.safepoint_every, rank, ranks, run_ahead)


def _on_cuda(context: EngineContext) -> bool:
    return bool(context.vllm_config.device_config.device_type == "cuda")


def _flag(context: EngineContext) -> Flag:
    if not context.config.safepoint:
        raise CoServingConfigError(
            "the safepoint plugin needs the name of its shared memory: set the connector's `safepoint`"
        )
    return Flag(context.config.safepoint)
