"""The safepoint: a part of the engine's connector that looks at the flag between layers, and leaves.

vLLM calls the connector before the attention of every layer, in eager and in compiled models. That is the
place where an iteration may end early: no layer is half done, and what it wrote is undone by the roll-back.

Tensor parallel ranks must leave at the same layer, or the others wait in a collective for ever. Rank 0
decides, for a layer far enough ahead that no rank can have passed it: every layer holds a collective, which
no rank leaves before rank 0 has entered it, and a rank's host runs at most `RUN_AHEAD` layers ahead of its
device.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.parts import EngineContext, Part, SchedulerHalf, WorkerHalf
from workers.coserving import flag as page
from workers.coserving.config import CoServingConfig, CoServingConfigError
from workers.coserving.flag import Flag
from workers.coserving.metrics import COUNTERS, HISTOGRAMS

NAME = "safepoint"
RUN_AHEAD = 2  # layers that a host may queue beyond the one its device has finished, in armed iterations


class SafepointAbort(BaseException):
    """Leaves the model's forward pass. Not an `Exception`: nothing on the way may swallow it."""


@dataclass(frozen=True, slots=True)
class Armed:
    """The order for a step that may be aborted."""

    epoch: int


class SafepointScheduler(SchedulerHalf):
    """Arms the steps that hold offline rows, each with an epoch of its own."""

    def __init__(self, flag: Flag, enabled: bool) -> None:
        self._flag = flag
        self._enabled = enabled
        self._offline: set[str] = set()
        # The engine's scheduler counts here, too (metrics.py).
        self.counts: Counter[str] = Counter()
        self.observations: defaultdict[str, list[float]] = defaultdict(list)
        self._epoch = page.new_epoch()

    def on_new_request(self, request: Any) -> None:
        if request.priority > 0:
            self._offline.add(request.request_id)

    def on_finished(self, request: Any, block_ids: list[int]) -> None:
        self._offline.discard(request.request_id)

    def order(self, scheduler_output: Any) -> Armed | None:
        # A step with a synchronous load is not armed: its rows count tokens that the load brings layer by
        # layer.
        if not self._enabled or scheduler_output.has_sync_kv_loads:
            return None
        if self._offline.isdisjoint(scheduler_output.num_scheduled_tokens):
            return None
        self._epoch += 1
        return Armed(self._epoch)

    def take_counts(self) -> Mapping[str, float]:
        counts, self.counts = self.counts, Counter()
        return counts

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        observations, self.observations = self.observations, defaultdict(list)
        return observations

    def shutdown(self) -> None:
        self._flag.remove()


class SafepointWorker(WorkerHalf):
    def __init__(self, flag: Flag, every: int, rank: int, ranks: int, run_ahead: int) -> None:
        self._flag = flag
        self._fields = flag.fields
        self._every = every
        self._decides = rank == 0
        self._agree = ranks > 1
        self._lead = 1 + run_ahead  # layers between rank 0's decision and the layer it is for
        self._index: dict[str, int] = {}
        self._epoch = 0
        self._checked_ns = 0
        self._fence: LayerFence | None = None
        self._bound = run_ahead

    def register(self, kv_caches: Any) -> None:
        self._index = {layer: index for index, layer in enumerate(kv_caches)}
        tensor = next(iter(kv_caches.values()))
        if tensor.device.type == "cuda":
            self._fence = LayerFence(len(self._index), self._bound)

    def before_step(self, order: Armed | None) -> None:
        self._epoch = order.epoch if order is not None else 0
        self._checked_ns = time.monotonic_ns()
        if self._decides:
            self._fields[page.RUNNING] = self._epoch

    def before_layer(self, layer: str) -> None:
        epoch = self._epoch
        if not epoch:
            return
        index = self._index[layer]
        if index % self._every:
            return
        if self._fence is not None:
            self._fence.wait(index)
        if self._agree:
            self._check_agreed(epoch, index)
        elif self._fields[page.RAISED] == epoch:
            self._abort(epoch, index)
        self._checked_ns = time.monotonic_ns()

    def after_layer(self, layer: str) -> None:
        if self._epoch and self._fence is not None:
            self._fence.passed(self._index[layer])

    def after_step(self) -> None:
        self._epoch = 0
        if self._decides:
            self._fields[page.RUNNING] = 0

    def shutdown(self) -> None:
        self._fields = memoryview(bytearray(len(self._fields) * 8)).cast("q")
        self._flag.close()

    def _check_agreed(self, epoch: int, index: int) -> None:
        decided_epoch, layer = page.unpack(self._fields[page.DECIDED])
        if decided_epoch == epoch:
            if index >= layer:
                self._abort(epoch, index)
        elif self._decides and self._fields[page.RAISED] == epoch:
            self._fields[page.DECIDED] = page.pack(epoch, index + self._lead)

    def _abort(self, epoch: int, index: int) -> None:
        if self._decides:
            now = time.monotonic_ns()
            self._fields[page.GAP_NS] = now - self._checked_ns
            self._fields[page.ABORTED_NS] = now
            self._fields[page.ABORTED_LAYER] = index
            self._fields[page.ABORTS] += 1
            self._fields[page.ABORTED] = epoch
        raise SafepointAbort


class LayerFence:
    """Keeps the host from queueing more than a few layers beyond what the device has done (CUDA).

    Without it the host is through all layers before the device has done the first, and the flag stops
    nothing.
    """

    def __init__(self, layers: int, ahead: int) -> None:
        import torch

        self._events = [torch.cuda.Event() for _ in range(layers)]
        self._ahead = ahead

    def passed(self, index: int) -> None:
        self._events[index].record()

    def wait(self, index: int) -> None:
        if index >= self._ahead:
            self._events[index - self._ahead].synchronize()


class SafepointPart(Part):
    name = NAME
    counters = COUNTERS
    histograms = HISTOGRAMS

    def scheduler_half(self, context: EngineContext) -> SafepointScheduler:
        config = CoServingConfig.from_additional_config(context.vllm_config.additional_config)
        enabled = config.serving.safepoints and config.serving.policy == "conserve"
        return SafepointScheduler(_flag(context), enabled)

    def worker_half(self, context: EngineContext, rank: int) -> SafepointWorker:
        config = CoServingConfig.from_additional_config(context.vllm_config.additional_config)
        ranks = context.vllm_config.parallel_config.tensor_parallel_size
        on_cuda = context.vllm_config.device_config.device_type == "cuda"
        return SafepointWorker(
            _flag(context), config.safepoint_every, rank, ranks, RUN_AHEAD if on_cuda else 0
        )


def _flag(context: EngineContext) -> Flag:
    if not context.config.safepoint:
        raise CoServingConfigError(
            "the safepoint part needs the name of its shared memory: "
            "set `safepoint` in the connector's settings"
        )
    return Flag(context.config.safepoint)
