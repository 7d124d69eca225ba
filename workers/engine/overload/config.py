"""Names by which vLLM loads what an engine needs to drop layers, and the models that can; needs no vLLM."""

from workers.processes import WorkerError

OVERLOAD_PLUGIN = "workers.engine.overload.plugin:OverloadPlugin"
DROPPING_SCHEDULER = "workers.engine.overload.drop_scheduler.DroppingScheduler"
DROPPING_WORKER = "workers.engine.overload.drop_worker.DroppingWorker"
DROPPING_CPU_WORKER = "workers.engine.overload.drop_cpu_worker.DroppingCpuWorker"
# The same for engines that co-serve.
COSERVING_DROPPING_SCHEDULER = "workers.engine.overload.drop_scheduler.CoServingDroppingScheduler"
COSERVING_DROPPING_WORKER = "workers.engine.overload.drop_worker.CoServingDroppingWorker"
COSERVING_DROPPING_CPU_WORKER = "workers.engine.overload.drop_cpu_worker.CoServingDroppingCpuWorker"
DROPPING_WORKERS = (DROPPING_WORKER, COSERVING_DROPPING_WORKER)  # on GPUs

# Models whose forward pass is an embedding, layers in order with a residual, and a norm, as
# tests/workers/overload/test_split_models.py reads in vLLM. It is a list because a model can look right and
# fail: vLLM may count the layers that a pass went through, for example to find experts.
SPLIT_MODELS = (
    *("GemmaForCausalLM", "LlamaForCausalLM", "Phi3ForCausalLM"),
    *("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)


class OverloadConfigError(WorkerError, ValueError):
    """This engine cannot drop parameters; the message says why and what to do."""
