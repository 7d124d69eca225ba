"""The worker of vLLM's CPU build that can drop parameters (a module of its own: CPU builds only)."""

from workers.cpu_worker import SeedSafeCpuWorker
from workers.overload.memfd import MemfdDriver, page_for
from workers.overload.pages import PageDriver
from workers.overload.worker import DroppingWorkerMixin


class DroppingCpuWorker(DroppingWorkerMixin, SeedSafeCpuWorker):
    def page_driver(self, nbytes: int) -> PageDriver:
        return MemfdDriver(page_for(nbytes))

    def compiled_in_the_way(self) -> str | None:
        eager = self.vllm_config.model_config.enforce_eager
        return None if eager else "compiled passes (start with --enforce-eager)"
