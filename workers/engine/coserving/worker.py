"""The worker of a co-serving engine: ends an iteration quietly when a safepoint left its forward pass."""

from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from kvtransfer.compat.relied_on import verify
from workers.engine.compat import coserving_runner as internals
from workers.engine.coserving.safepoint import SafepointAbort


class SafepointWorkerMixin:
    """In front of one of vLLM's worker classes."""

    model_runner: Any
    _left_early = False
    _aborted: Any | None = None  # the scheduler output of the iteration that ended early

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        super().load_model(**kwargs)  # type: ignore[misc]
        internals.wrap_forward(self.model_runner, self._ending_early)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._left_early = False
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        self._aborted = scheduler_output if self._left_early else None
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        aborted, self._aborted = self._aborted, None
        if aborted is not None:
            return internals.nothing_sampled(self.model_runner, aborted)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]

    def _ending_early(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def until_safepoint(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except SafepointAbort:
                self._left_early = True
                return internals.empty_hidden_states(self.model_runner, kwargs["positions"])

        return until_safepoint


class CoServingWorker(SafepointWorkerMixin, Worker):
    """On CUDA, with the V1 model runner."""
