"""Model-free engine with asynchronous scheduling, run by vLLM's own `EngineCore` with our patch.

An iteration is computed only when its result is asked for, which may be after the next iteration was
scheduled. A real device may be as late.
"""

import queue
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.workers.coserving.model_free import ModelFreeEngine
from workers.engine.coserving import safepoint as page


class LateResult:
    """Future whose work runs when its result is asked for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result = work


class Core(EngineCore):
    """vLLM's engine core without its processes and its model."""

    def __init__(self, engine: "OverlappedEngine") -> None:
        self.scheduler = engine.scheduler
        self.vllm_config = engine.scheduler.vllm_config
        self.model_executor = engine
        self.batch_queue_size = 2
        self.batch_queue = deque(maxlen=2)
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False
        self.log_stats = False
        self.aborts_queue: Any = queue.Queue()
        self._weight_version = 0


class OverlappedEngine(ModelFreeEngine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "overlapping": True})
        self.core = Core(self)
        self.overlapped = 0  # steps that were scheduled while another was in flight
        self.most_in_flight = 0
        self._shares = 0.0, 0.0
        self._loaded: frozenset[str] = frozenset()
        self._ordered: Any = None

    def step(
        self, abort_share: float, hang_up_share: float = 0.0, loaded: frozenset[str] = frozenset()
    ) -> None:
        """Run a round of vLLM's loop: handle arrivals and disconnected clients, and run an iteration."""
        self._shares, self._loaded = (abort_share, hang_up_share), loaded
        if self._rng.random() < hang_up_share / 2 and self.scheduler.running:
            gone = self._rng.choice(self.scheduler.running).request_id
            self._hang_up(gone)
            self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        if not (self.scheduler.has_requests() or self.core.batch_queue):
            return
        outputs, _ = self.core.step_with_batch_queue()
        assert not any(self._may_abort(step[1]) for step in self.core.batch_queue)
        for to_client in (outputs or {}).values():
            for output in to_client.outputs:
                if output.request_id in self.outputs:
                    self.outputs[output.request_id] += output.new_token_ids

    def execute_model(self, step: Any, non_block: bool) -> LateResult:
        in_flight = sum(bool(one[1].num_scheduled_tokens) for one in self.core.batch_queue)
        if step.num_scheduled_tokens:
            self.overlapped += in_flight > 0
            assert not in_flight or not self._may_abort(step), "a step that may be aborted is not alone"
        self._ordered = step
        return LateResult(lambda: None if step.num_scheduled_tokens else self._result([], {}, []))

    def sample_tokens(self, grammar_output: Any, non_block: bool) -> LateResult:
        step, rows = self._ordered, self.rows_of(self._ordered)
        epoch = self.scheduler.plugin(page.NAME).armed

        def result() -> ModelRunnerOutput:
            aborted = bool(epoch) and self._rng.random() < self._shares[0]
            sampled = self.forward(rows, aborted)
            if aborted:
                self.aborts += 1
                self._flag.fields[page.ABORTED] = epoch
            if self._rng.random() < self._shares[1]:
                gone = self._rng.choice(rows).key
                self._hang_up(gone)
                self.core.aborts_queue.put([gone])
            keys = [row.key for row in rows]
            index = {key: number for number, key in enumerate(keys)}
            return self._result(keys, index, [] if aborted else sampled)

        assert step.num_scheduled_tokens
        return LateResult(result)

    def _result(self, *made: Any) -> ModelRunnerOutput:
        output = ModelRunnerOutput(*made)
        if loaded := self._loaded | self.loads_ended():
            output.kv_connector_output = KVConnectorOutput(finished_recving=set(loaded))
        return output

    def _hang_up(self, key: str) -> None:
        self.hung_up += self.outputs.pop(key, None) is not None

    @staticmethod
    def _may_abort(step: Any) -> bool:
        return page.NAME in step.kv_connector_metadata.orders
