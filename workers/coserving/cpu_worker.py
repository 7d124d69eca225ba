"""The co-serving worker of vLLM's CPU build (a module of its own: the import works there only)."""

from workers.coserving.worker import SafepointWorkerMixin
from workers.cpu_worker import SeedSafeCpuWorker


class CoServingCpuWorker(SafepointWorkerMixin, SeedSafeCpuWorker):
    """Safepoints in front of the mended worker."""
