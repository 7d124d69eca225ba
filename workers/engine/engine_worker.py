"""Worker of an engine, for vLLM's `--worker-cls`: vLLM's worker with forward passes that can end early."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from kvtransfer.compat.relied_on import verify
from workers.engine.compat import coserving_runner as internals
from workers.engine.compat import cpu_build
from workers.engine.forward_ended import ForwardEnded
from workers.engine.overload.config import layer_sharing

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker


class EngineWorker(BaseWorker):
    """Worker that skips sampling after a forward pass that ended early, and carries out layer sharing.

    A forward pass ends early at a safepoint, or because a peer that keeps a part of the layers is lost.
    """

    _sharing: Any | None = None  # the `LayerSharing` of an engine that can drop layers
    _ended_early = False
    _without_result: Any | None = None  # scheduler output of the last iteration, if its pass ended early

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        if current_platform.is_cpu():
            verify(cpu_build.SPINNING)
            cpu_build.nap_instead_of_spinning()
        self._sharing = layer_sharing(self.vllm_config)
        with self._sharing.loading() if self._sharing else nullcontext():
            super().load_model(**kwargs)
        if self._sharing is not None:
            self._sharing.attach(self.model_runner)
        internals.wrap_forward(self.model_runner, self._ending_early)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if self._sharing is not None:
            self._sharing.start(int(kv_cache_config.num_blocks))

    def execute_model(self, scheduler_output: Any) -> Any:
        self._ended_early = False
        step: AbstractContextManager[None] = self._sharing.step() if self._sharing else nullcontext()
        with step:
            output = super().execute_model(scheduler_output)
        self._without_result = scheduler_output if self._ended_early else None
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        ended, self._without_result = self._without_result, None
        if ended is not None:
            return internals.nothing_sampled(self.model_runner, ended)
        if not current_platform.is_cpu():
            return super().sample_tokens(grammar_output)
        with internals.discarded_requests_unseeded(self.model_runner):
            return super().sample_tokens(grammar_output)

    def _ending_early(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def until_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except ForwardEnded:
                self._ended_early = True
                return internals.empty_hidden_states(self.model_runner, kwargs["positions"])

        return until_end
