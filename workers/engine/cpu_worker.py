"""The worker of vLLM's CPU build, with one fault of it mended (a module of its own: CPU builds only)."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvtransfer.compat.relied_on import verify
from workers.engine.compat import coserving_runner as internals
from workers.engine.compat import cpu_build
from workers.engine.coserving.worker import SafepointWorkerMixin


class SeedSafeCpuWorker(CPUWorker):
    """Without this a request with a `seed` whose prompt takes several chunks ends the engine."""

    def load_model(self, **kwargs: Any) -> None:
        verify(internals.WORKING)
        verify(cpu_build.SPINNING)
        cpu_build.nap_instead_of_spinning()
        super().load_model(**kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        with internals.discarded_requests_unseeded(self.model_runner):
            return super().sample_tokens(grammar_output)


class CoServingCpuWorker(SafepointWorkerMixin, SeedSafeCpuWorker):
    """Safepoints in front of the mended worker."""
