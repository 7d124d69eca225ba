"""What an engine that can drop parameters is started with; no vLLM is needed to read this."""

from workers.processes import WorkerError

OVERLOAD_PLUGIN = "workers.overload.plugin:OverloadPlugin"
DROPPING_SCHEDULER = "workers.overload.plugin.DroppingScheduler"
DROPPING_WORKER = "workers.overload.worker.DroppingWorker"
DROPPING_CPU_WORKER = "workers.overload.cpu_worker.DroppingCpuWorker"
# Of those that co-serve.
COSERVING_DROPPING_SCHEDULER = "workers.overload.plugin.CoServingDroppingScheduler"
COSERVING_DROPPING_WORKER = "workers.overload.worker.CoServingDroppingWorker"
DROPPING_WORKERS = (DROPPING_WORKER, COSERVING_DROPPING_WORKER)  # on GPUs
COSERVING_DROPPING_CPU_WORKER = "workers.overload.cpu_worker.CoServingDroppingCpuWorker"

# Models whose pass is that of a split: an embedding, layers one after the other with a residual, a norm, as
# tests/workers/overload/test_split_models.py reads in vLLM. A list, because layers may look right and not be:
# experts vLLM may find by counting the layers that the pass went through, and half of a pass counts wrongly.
SPLIT_MODELS = (
    *("GemmaForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)


class OverloadConfigError(WorkerError, ValueError):
    """This engine cannot drop parameters; the message says why and what to do."""
