"""The worker of vLLM's CPU build that can drop parameters (a module of its own: CPU builds only)."""

from workers.cpu_worker import CoServingCpuWorker, SeedSafeCpuWorker
from workers.overload.memfd import MemfdDriver, page_for
from workers.overload.pages import PageDriver
from workers.overload.worker import DroppingWorkerMixin


class DroppingOnCpus(DroppingWorkerMixin):
    """In front of one of our workers of the CPU build."""

    def page_driver(self, nbytes: int) -> PageDriver:
        return MemfdDriver(page_for(nbytes))

    def compiled_in_the_way(self) -> str | None:
        eager = self.vllm_config.model_config.enforce_eager
        return None if eager else "compiled passes (start with --enforce-eager)"


class DroppingCpuWorker(DroppingOnCpus, SeedSafeCpuWorker):
    """Without co-serving."""


class CoServingDroppingCpuWorker(DroppingOnCpus, CoServingCpuWorker):
    """Its passes end early at safepoints while it has the whole model."""
