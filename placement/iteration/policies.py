"""The policies ConServe is measured against, and all policies by name."""

import math
from dataclasses import replace

from placement import PlacementError
from placement.iteration import memory
from placement.iteration.conserve import Conserve, Margin, cost_of_losing, online_then_offline
from placement.iteration.interface import (
    BatchBuilder,
    EngineView,
    IterationDone,
    IterationPlan,
    RequestView,
    ServingPolicy,
    ServingSettings,
)
from placement.iteration.latency import BatchWork, LatencyModel
from placement.iteration.online import share_out
from placement.iteration.prompts import PromptSharing
from placement.order import ClassOrder


class UnknownPolicyError(PlacementError, ValueError):
    """No in-engine policy has this name."""


class OnlineOnly(ServingPolicy):
    """Offline work never runs: the best latency that online work can have here."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        work = memory.online_work(memory.online_requests(view), view.max_tokens)
        taken = memory.victims(view, cost_of_losing)
        builder = BatchBuilder(model, work, 0, None, admit_waiting=False)
        staying = memory.without(view.running, taken)
        return IterationPlan(online_then_offline(staying), tuple(r.key for r in taken), builder)


class PromptsInOrder(ServingPolicy):
    """Without co-serving: whoever decodes has a token, prompts what time the TBT targets leave, offline last.

    vLLM's own rules say who has memory, and who gives it.
    """

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._margin = Margin(settings.margin, beyond=0.2)
        self._classes = ClassOrder()

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        decoding = tuple(request for request in view.running if request.decoding)
        target = min((request.slo.tbt_s for request in decoding), default=math.inf)
        arriving_s = self._settings.slo.tbt_s
        sharing = PromptSharing(target * (1 - self._margin.share), arriving_s=arriving_s)
        prompts = (request for request in memory.online_requests(view) if not request.decoding)
        requests = (*decoding, *prompts)
        first = share_out(requests, view.now, view.max_tokens, model, sharing, self._classes)
        forecast = None
        if view.pipeline is not None:
            forecast, first = first.forecast(view.pipeline), first.beside(view.pipeline)
        offline = sum(request.offline for request in decoding)  # take their token from what is left
        waiting = tuple(request.key for request in first.prompts if not request.running)
        left = 0 if first.held_back else view.max_tokens - first.work.new_tokens
        builder = BatchBuilder(
            model, first.work, left + offline,
            first.seconds if decoding else None, floor=lambda request: int(request.decoding), caps=first.caps,
            planned=frozenset(waiting), unplanned_s=first.seconds,
        )  # fmt: skip
        order = online_then_offline(view.running, first.prompts)
        return IterationPlan(order, (), builder, waiting, forecast)

    def observe(self, done: IterationDone) -> None:
        self._margin.see(done.predicted_s, done.seconds)


class TurnsAlone(PromptsInOrder):
    """While engines share their layers: offline requests give back all they hold, and none starts."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        offline = tuple(request for request in view.running if request.offline)
        plan = super().plan(replace(view, running=memory.without(view.running, offline)), model)
        plan.builder.admit_waiting = False
        return replace(plan, preempt=tuple(request.key for request in offline))


class NonPreemptive(ServingPolicy):
    """Online is admitted first, but offline work that runs keeps its memory, its slot and its turn."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        order = tuple(request.key for request in view.running)
        return IterationPlan(order, (), BatchBuilder(model, BatchWork(), view.max_tokens, None))


class Sarathi(ServingPolicy):
    """Chunked prefill with priorities: offline fills the engine's chunk, and is preempted for memory only."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        taken = memory.victims(view, lambda r: (-r.arrival,))
        work = memory.online_work(memory.online_requests(view), view.max_tokens)
        builder = BatchBuilder(model, work, view.max_tokens - work.new_tokens, None, admit_waiting=not taken)
        staying = memory.without(view.running, taken)
        return IterationPlan(online_then_offline(staying), tuple(r.key for r in taken), builder)


class RoundRobin(ServingPolicy):
    """Online and offline requests take turns, an iteration each: BROS's own baseline."""

    _offline_turn = False

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        online = memory.online_requests(view)
        # Waiting offline requests come after waiting online ones: they have a turn only without those.
        startable = view.offline_waiting and not view.online_waiting
        offline = startable or any(request.offline for request in view.running)
        self._offline_turn = bool(offline) and (not online or not self._offline_turn)
        order = tuple(request.key for request in view.running)
        if self._offline_turn:
            left_out = {request.key: 0 for request in online}
            builder = BatchBuilder(model, BatchWork(), view.max_tokens, None, caps=left_out)
            return IterationPlan(order, (), builder)
        return IterationPlan(order, (), BatchBuilder(model, BatchWork(), 0, None, admit_waiting=False))


class Bros(ServingPolicy):
    """BROS: online by time to the token deadline, offline by least swap-in cost, adaptive batch size.

    Its bidirectional sharing of a block's slots needs attention kernels of its own. What it is for, giving
    online work no more of an offline request's memory than it takes, holds here at the granularity of blocks
    (see memory.victims); slots would gain at most 0.9 % of throughput (docs/measurements/coserving.md). It
    preempts between iterations only, which the residual time keeps short.
    """

    batch_start = 8  # requests of the first batch, and after a violation

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._batch = self.batch_start
        self._overrun = False

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        online = sorted(memory.online_requests(view), key=lambda r: (r.deadline(), r.key))
        taken = memory.victims(view, lambda r: (r.restore_blocks + r.saved_blocks, -r.arrival))
        offline = sorted(
            (request for request in memory.without(view.running, taken) if request.offline),
            key=lambda request: (*self.start_order(request), request.key),
        )
        residual = max(online[0].deadline() - view.now, 0.0) if online else None
        chosen = online[: self._batch]
        slots = max(self._batch - len(chosen), 0)
        waiting = len(offline) + view.offline_waiting
        if slots == 0:
            chosen, slots = self._replace_least_urgent(chosen, waiting, view.now, model)
        left_out = {request.key: 0 for request in online if request not in chosen}
        work = memory.online_work(chosen, view.max_tokens)
        target = residual * (1 - self._settings.margin) if residual is not None else None
        self._overrun = target is not None and model.seconds(work) > target
        builder = BatchBuilder(
            model, work, view.max_tokens - work.new_tokens, target, slots_left=slots, caps=left_out,
            admit_waiting=not taken,
        )  # fmt: skip
        order = [r.key for r in online if r.running] + [r.key for r in offline]
        return IterationPlan(tuple(order), tuple(r.key for r in taken), builder)

    def start_order(self, request: RequestView) -> tuple[float, ...]:
        return (request.restore_blocks, request.arrival)

    def _replace_least_urgent(
        self, chosen: list[RequestView], offline: int, now: float, model: LatencyModel
    ) -> tuple[list[RequestView], int]:
        """Requests that still meet their deadline after sitting out this iteration give their slot away."""
        kept, slots = list(chosen), 0
        seconds = model.seconds(memory.online_work(kept, 1 << 30))
        while offline > slots and len(kept) > 1 and kept[-1].deadline() - now > 3 * seconds:
            kept.pop()
            slots += 1
        return kept, slots

    def observe(self, done: IterationDone) -> None:
        if self._overrun or done.late_requests:
            self._batch = self.batch_start
        else:
            self._batch += 1


POLICIES: dict[str, type[ServingPolicy]] = {
    "bros": Bros,
    "conserve": Conserve,
    "non_preemptive": NonPreemptive,
    "online_only": OnlineOnly,
    "prompts_in_order": PromptsInOrder,
    "round_robin": RoundRobin,
    "sarathi": Sarathi,
}


def make_policy(settings: ServingSettings) -> ServingPolicy:
    try:
        return POLICIES[settings.policy.replace("-", "_")](settings)
    except KeyError:
        raise UnknownPolicyError(
            f"no in-engine policy is called {settings.policy!r}; choose one of {', '.join(POLICIES)}"
        ) from None
