"""Transfer as a part of the connector."""

from kvtransfer.parts import EngineContext, Part
from kvtransfer.transfer.scheduler import TransferScheduler
from kvtransfer.transfer.worker import TransferWorker


class TransferPart(Part):
    name = "transfer"

    def scheduler_half(self, context: EngineContext) -> TransferScheduler:
        return TransferScheduler(context)

    def worker_half(self, context: EngineContext, rank: int) -> TransferWorker:
        return TransferWorker(context, rank)
