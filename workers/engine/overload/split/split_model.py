"""Entry point of a worker to a split: carries out orders, reports their results, and runs forward passes."""

import logging
import time
from typing import Any

import torch

from workers.engine.overload.orders import DropOrder, RestoreOrder, SplitEvent, SplitReport, WorkerFacts
from workers.engine.overload.pages.layer_memory import LayerWeights, ReservedKv
from workers.engine.overload.split.engine_split import EngineSplit
from workers.engine.overload.split.exchange import KvExchange
from workers.engine.overload.split.membership import DeviceLock, PeerSettings
from workers.engine.overload.split.passes import SplitPasses
from workers.engine.overload.split.peer_link import PeerError, PeerServer
from workers.engine.overload.split.peer_service import PeerService
from workers.engine.overload.split.transitions import drop_layers, restore_layers

logger = logging.getLogger("conserve.workers.overload")


class SplitModel:
    """Model of a worker whose layers may be shared with other engines, used in the worker's thread.

    Every engine keeps its scheduler and its requests. Its batches go through all layers in order: through the
    kept layers here, and through the dropped layers at the members that keep them. Batches of the other
    members come here for the layers that are kept here.
    """

    def __init__(
        self,
        runner: Any,
        kv: ReservedKv,
        weights: LayerWeights,
        blocks: int,
        device: DeviceLock,
        settings: PeerSettings,
    ) -> None:
        """Start with the whole model, whose pool has `blocks` blocks."""
        self.split = EngineSplit(runner, kv, weights, blocks, device)
        self.passes = SplitPasses(runner, device)
        self.exchange = KvExchange(kv)
        self._settings = settings
        self.service = PeerService(self.split, self.passes)
        self._server = PeerServer(
            settings.host, settings.secret, self.service.answer, encrypt=settings.encrypt
        )
        self._report: SplitReport | None = SplitReport(SplitEvent.READY, 0, blocks, facts=self.facts())

    @property
    def is_split(self) -> bool:
        return self.split.member is not None

    def facts(self) -> WorkerFacts:
        weights, config = self.split.weights, self.split.runner.model_config
        return WorkerFacts(
            self._server.address,
            len(weights),
            max(map(weights.layer_bytes, range(len(weights)))),
            self.split.kv.row_bytes,
            int(config.get_hidden_size() * config.dtype.itemsize),
        )

    def drop(self, order: DropOrder) -> None:
        began = time.monotonic()
        reason = drop_layers(self.split, self.exchange, self._settings, order, began)
        self._finish(SplitEvent.NOT_SPLIT if reason else SplitEvent.SPLIT, order.epoch, began, reason)

    def restore(self, order: RestoreOrder) -> None:
        """Restore the whole model. If the split was lost meanwhile, its loss has already been reported."""
        began, member = time.monotonic(), self.split.member
        if member is not None and member.epoch == order.epoch:
            reason = restore_layers(self.split, self.exchange, order, member, began)
            self._finish(SplitEvent.LOST if reason else SplitEvent.RESTORED, order.epoch, began, reason)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, embedded: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the model's hidden states, or None if a peer is lost, so that the caller must not sample."""
        member = self.split.member
        assert member is not None
        try:
            return self.passes.forward(member, input_ids, positions, embedded)
        except PeerError as error:
            began = time.monotonic()
            self.split.lose(member, error)
            self._finish(SplitEvent.LOST, member.epoch, began, str(error))
            return None

    def take_report(self) -> SplitReport | None:
        """Return the report of how the last order ended, once; None if there is no new report."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        self._server.close()

    def _finish(self, event: SplitEvent, epoch: int, began: float, reason: str) -> None:
        member, seconds = self.split.member, time.monotonic() - began
        blocks = member.blocks if member is not None else self.split.whole_blocks
        moved_bytes, moved_s = self.exchange.take_moved()
        self._report = SplitReport(event, epoch, blocks, seconds, reason, None, moved_bytes, moved_s)
        logger.info("%s epoch=%d blocks=%d seconds=%.3f reason=%r", event, epoch, blocks, seconds, reason)
