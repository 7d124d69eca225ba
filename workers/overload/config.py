"""What an engine that can drop parameters is started with; no vLLM is needed to read this."""

OVERLOAD_PLUGIN = "workers.overload.plugin:OverloadPlugin"
DROPPING_SCHEDULER = "workers.overload.scheduler.DroppingScheduler"
DROPPING_WORKER = "workers.overload.worker.DroppingCpuWorker"
