"""Checkpoint as a part of the connector."""

from kvtransfer.checkpoint.scheduler import CheckpointScheduler
from kvtransfer.checkpoint.worker import CheckpointWorker
from kvtransfer.parts import EngineContext, Part


class CheckpointPart(Part):
    name = "checkpoint"

    def scheduler_half(self, context: EngineContext) -> CheckpointScheduler:
        return CheckpointScheduler(context)

    def worker_half(self, context: EngineContext, rank: int) -> CheckpointWorker:
        return CheckpointWorker(context)
