"""The worker of vLLM's CPU build, with one fault of it mended (a module of its own: CPU builds only)."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from workers.coserving import vllm_contact as contact


class SeedSafeCpuWorker(CPUWorker):
    """Without this a request with a `seed` whose prompt takes several chunks ends the engine."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        with contact.discarded_rows_unseeded(self.model_runner):
            return super().sample_tokens(grammar_output)
