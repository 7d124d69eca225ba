"""Worker of vLLM's CPU build that can drop layers; a module of its own, because it imports only there."""

from workers.engine.cpu_worker import CoServingCpuWorker, SeedSafeCpuWorker
from workers.engine.overload.drop_worker import DroppingWorkerMixin
from workers.engine.overload.pages.cpu_pages import CpuPageDriver
from workers.engine.overload.pages.physical_memory import PageDriver


class DroppingOnCpu(DroppingWorkerMixin):
    """Part for the CPU build."""

    def page_driver(self) -> PageDriver:
        return CpuPageDriver()

    def unsupported_compilation(self) -> str | None:
        eager = self.vllm_config.model_config.enforce_eager
        return None if eager else "compiled passes (start with --enforce-eager)"


class DroppingCpuWorker(DroppingOnCpu, SeedSafeCpuWorker):
    """Worker on a CPU without co-serving."""


class CoServingDroppingCpuWorker(DroppingOnCpu, CoServingCpuWorker):
    """Worker on a CPU with co-serving; its passes stop at safepoints only with the whole model."""
