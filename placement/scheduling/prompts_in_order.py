"""In-engine policies of engines without co-serving, and of engines that share their layers."""

import math
from dataclasses import replace

from placement.priorities import ClassOrder
from placement.scheduling import memory_preemption
from placement.scheduling.conserve import Margin, online_then_offline
from placement.scheduling.interface import (
    BatchBuilder,
    EngineView,
    IterationDone,
    IterationPlan,
    ServingPolicy,
    ServingSettings,
)
from placement.scheduling.latency_model import LatencyModel
from placement.scheduling.prompt_budget import share_online
from placement.scheduling.prompt_order import PromptSharing


class PromptsInOrder(ServingPolicy):
    """Policy without co-serving: decoding requests get a token each, and prompts the time that is left.

    Offline requests come last. vLLM's own rules decide which requests get memory and which are preempted.
    """

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._margin = Margin(settings.margin, beyond=0.2)
        self._classes = ClassOrder()

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        decoding = tuple(request for request in view.running if request.decoding)
        target_s = min((request.slo.tbt_s for request in decoding), default=math.inf)
        sharing = PromptSharing(target_s * (1 - self._margin.share))
        prompts = (request for request in memory_preemption.online_requests(view) if not request.decoding)
        requests = (*decoding, *prompts)
        first = share_online(requests, view.now, view.max_tokens, model, sharing, self._classes)
        offline = sum(request.offline for request in decoding)  # in `first`, and counted again by `take`
        waiting = tuple(request.key for request in first.prompts if not request.running)
        left = 0 if first.held_back else view.max_tokens - first.work.new_tokens
        builder = BatchBuilder(
            model,
            first.work,
            left + offline,
            first.seconds if decoding else None,
            floor=lambda request: int(request.decoding),
            caps=first.caps,
            planned=frozenset(waiting),
            unplanned_s=first.seconds,
        )
        order = online_then_offline(view.running, first.prompts)
        return IterationPlan(order, (), builder, waiting)

    def observe(self, done: IterationDone) -> None:
        self._margin.observe(done.predicted_s, done.seconds)


class TurnsAlone(PromptsInOrder):
    """Policy of engines that share their layers: it preempts all offline requests, and starts none."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        offline = tuple(request for request in view.running if request.offline)
        plan = super().plan(replace(view, running=memory_preemption.without(view.running, offline)), model)
        plan.builder.admit_waiting = False
        return replace(plan, preempt=tuple(request.key for request in offline))
