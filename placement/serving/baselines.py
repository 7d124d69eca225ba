"""The policies ConServe is measured against."""

from placement.latency import BatchWork, LatencyModel
from placement.serving import memory
from placement.serving.conserve import cost_of_losing, online_then_offline
from placement.serving.policy import ServingSettings
from placement.serving.state import EngineView, Filling, IterationDone, Plan, Row, RunningBatch


class _Baseline:
    """Decides between iterations only, and learns nothing."""

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings

    def interrupts(self, arrival: Row, queued: BatchWork, batch: RunningBatch, model: LatencyModel) -> bool:
        return False

    def observe(self, done: IterationDone) -> None:
        return None


class OnlineOnly(_Baseline):
    """Offline work never runs: the best latency that online work can have here."""

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        work = memory.online_work(memory.online_rows(view), view.max_tokens)
        taken = memory.victims(view, cost_of_losing)
        filling = Filling(model, work, 0, None, admit_waiting=False)
        staying = memory.without(view.running, taken)
        return Plan(online_then_offline(staying), tuple(row.key for row in taken), filling)


class NonPreemptive(_Baseline):
    """Online is admitted first, but offline work that runs keeps its memory, its slot and its turn."""

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        order = tuple(row.key for row in view.running)
        return Plan(order, (), Filling(model, BatchWork(), view.max_tokens, None))


class Sarathi(_Baseline):
    """Chunked prefill with priorities: offline fills the fixed chunk, and is preempted for memory only."""

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        taken = memory.victims(view, lambda row: (-row.arrival,))
        work = memory.online_work(memory.online_rows(view), view.max_tokens)
        chunk = min(self._settings.chunk_tokens, view.max_tokens)
        filling = Filling(model, work, max(chunk - work.new_tokens, 0), None, admit_waiting=not taken)
        staying = memory.without(view.running, taken)
        return Plan(online_then_offline(staying), tuple(row.key for row in taken), filling)


class RoundRobin(_Baseline):
    """Online and offline rows take turns, an iteration each: BROS's own baseline."""

    _offline_turn = False

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        online = memory.online_rows(view)
        # Waiting offline rows come after waiting online ones: they have a turn only without those.
        startable = view.offline_waiting and not view.online_waiting
        offline = startable or any(row.offline for row in view.running)
        self._offline_turn = bool(offline) and (not online or not self._offline_turn)
        order = tuple(row.key for row in view.running)
        if self._offline_turn:
            left_out = {row.key: 0 for row in online}
            return Plan(order, (), Filling(model, BatchWork(), view.max_tokens, None, caps=left_out))
        return Plan(order, (), Filling(model, BatchWork(), 0, None, admit_waiting=False))
