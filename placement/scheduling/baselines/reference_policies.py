"""Simple in-engine policies that ConServe is compared with."""

from placement.scheduling import memory_preemption
from placement.scheduling.conserve import cost_of_losing, online_then_offline
from placement.scheduling.interface import BatchBuilder, EngineView, IterationPlan, ServingPolicy
from placement.scheduling.latency_model import BatchWork, LatencyModel


class OnlineOnly(ServingPolicy):
    """Policy that never runs offline work, which shows the lowest possible latency of online work."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        work = memory_preemption.online_work(memory_preemption.online_requests(view), view.max_tokens)
        taken = memory_preemption.victims(view, cost_of_losing)
        builder = BatchBuilder(model, work, 0, None, admit_waiting=False)
        staying = memory_preemption.without(view.running, taken)
        return IterationPlan(online_then_offline(staying), tuple(r.key for r in taken), builder)


class NonPreemptive(ServingPolicy):
    """Policy that never takes memory or a slot from a running offline request."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        order = tuple(request.key for request in view.running)
        return IterationPlan(order, (), BatchBuilder(model, BatchWork(), view.max_tokens, None))


class Sarathi(ServingPolicy):
    """Chunked prefill with priorities: offline work fills the chunk, and is preempted between iterations."""

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        taken = memory_preemption.victims(view, lambda r: (-r.arrival,))
        work = memory_preemption.online_work(memory_preemption.online_requests(view), view.max_tokens)
        builder = BatchBuilder(model, work, view.max_tokens - work.new_tokens, None, admit_waiting=not taken)
        staying = memory_preemption.without(view.running, taken)
        return IterationPlan(online_then_offline(staying), tuple(r.key for r in taken), builder)
