"""Connector plugin of an engine that can drop layers.

Between iterations, the scheduler side turns a command of the directory into an order for the worker. It grows
or shrinks the pool of blocks when the worker reports how the order ended. While an engine shares layers, or
is about to, no KV is loaded into it or copied from it (`kv_state.kv_io_suspended`). KV that a transfer or the
host would have brought is computed instead. Copies that have begun end first.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransfer.plugins import EngineContext, Plugin, SchedulerSide, WorkerSide
from placement.engines import SplitState
from placement.overload.drop_plan import EngineShape
from placement.scheduling.latency_model import LatencyModel
from workers.engine.compat import block_pool as internals
from workers.engine.overload.command_inbox import CommandInbox
from workers.engine.overload.metrics import COUNTERS, HISTOGRAMS, SplitStatistics
from workers.engine.overload.orders import DropOrder, RestoreOrder, SplitEvent, SplitReport
from workers.engine.overload.split.split_model import SplitModel

logger = logging.getLogger("conserve.workers.overload")

NAME = "overload"
FENCE_S = 5.0  # time for copies and transfers to end before a drop
CACHED_KV_S = 1.0  # longest time to move KV that only the prefix cache holds; the rest is evicted
SplitOrder = DropOrder | RestoreOrder


class OverloadScheduler(SchedulerSide):
    """Scheduler side, a state machine: the engine is whole, about to drop, split, or about to restore."""

    def __init__(self, context: EngineContext) -> None:
        self._kv_state = context.kv_state
        self.inbox = CommandInbox(self._kv_state.clock)
        self._statistics = SplitStatistics(self._kv_state.clock)
        context.commands.update(drop=self.inbox.drop, restore=self.inbox.restore)
        self._order: SplitOrder | None = None
        self._latency: LatencyModel | None = None  # of the whole model
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._pool: Any = None
        self._whole_blocks = 0

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool
        self._whole_blocks = int(self._pool.num_gpu_blocks)

    @property
    def pending(self) -> bool:
        """Return whether a command waits or runs, so that even an idle engine has to run iterations."""
        return self.inbox.command is not None

    @property
    def kv_io_suspended(self) -> bool:
        """Return whether layers are shared or about to be."""
        return bool(self._kv_state.kv_io_suspended)

    def between_steps(self, scheduler: Any) -> None:
        """Turn a command into an order for the iteration that is about to be planned."""
        if self._statistics.forget_old_measurement():
            self._publish()
        command = self.inbox.command
        if command is None or self._order is not None:
            return
        if command.command == "drop":
            self._kv_state.kv_io_suspended = True
            if self._kv_state.no_kv_in_flight:
                self._order = DropOrder(command.epoch, command.members, command.part, [])
            elif self.inbox.age_s > FENCE_S:
                self._end(SplitEvent.NOT_SPLIT, command.epoch, "copies or transfers did not end in time")
        elif command.epoch != self.inbox.epoch:
            self.inbox.done()  # the split was lost meanwhile
        else:
            moves = internals.shrink_pool(scheduler, self._whole_blocks)
            self._order = RestoreOrder(command.epoch, moves, [])

    def order(self, scheduler_output: Any) -> SplitOrder | None:
        """Return the order for this iteration, with the blocks that hold KV after it was planned."""
        match self._order:
            case DropOrder(epoch, members, part):
                return DropOrder(epoch, members, part, self._blocks_to_move())
            case RestoreOrder(epoch, moves):
                return RestoreOrder(epoch, moves, self._blocks_to_move())
        return None

    def _blocks_to_move(self) -> list[int]:
        """Return the blocks of requests, and as many cached blocks as the link moves in `CACHED_KV_S`.

        The cached blocks that would be evicted last are chosen. The others are evicted.
        """
        held, cached = internals.used_blocks(self._pool)
        facts = self.inbox.facts
        block_bytes = facts.row_bytes * facts.layers if facts is not None else 1
        most = int(CACHED_KV_S * self._statistics.link_bytes_per_s / block_bytes)
        if evicted := cached[most:]:
            internals.evict_blocks(self._pool, evicted)
            self._statistics.count("split_forgotten_blocks", len(evicted))
            logger.warning("%d blocks of the prefix cache are evicted, not moved", len(evicted))
        return [*held, *cached[:most]]

    def after_step(self, scheduler: Any, report: SplitReport | None) -> None:
        """Process the worker's report, before the tokens of the iteration are processed."""
        order, self._order = self._order, None
        if report is None:
            if order is not None:
                logger.error("the worker did not carry out an order epoch=%d", order.epoch)
                self.inbox.done()
            return
        if report.facts is not None:
            self.inbox.facts = report.facts
            self._publish()
            return
        self._statistics.add(report)
        if report.event is SplitEvent.LOST:
            internals.start_over(scheduler, self._whole_blocks)
        elif report.event is SplitEvent.SPLIT:
            internals.grow_pool(scheduler, report.blocks)
        self._end(report.event, report.epoch, report.reason)

    def _end(self, event: SplitEvent, epoch: int, reason: str) -> None:
        is_split = event is SplitEvent.SPLIT
        self._kv_state.kv_io_suspended = is_split
        self.inbox.epoch = epoch if is_split else 0
        self.inbox.done()
        self._statistics.count(f"splits.{event}")
        self._publish()
        succeeded = event in (SplitEvent.SPLIT, SplitEvent.RESTORED)
        level = logging.INFO if succeeded else logging.WARNING
        blocks = self._pool.num_gpu_blocks
        logger.log(level, "overload %s epoch=%d blocks=%d reason=%r", event, epoch, blocks, reason)

    def measured(self, latency: LatencyModel) -> None:
        """Set the latency model of the engine with its whole model, which drop plans use."""
        if not self.inbox.epoch and latency != self._latency:
            self._latency = latency
            self._publish()

    def _publish(self) -> None:
        """Update the `SplitState` that this engine reports to the directory."""
        inbox, facts = self.inbox, self.inbox.facts
        if facts is None:
            return
        shape = EngineShape(
            layers=facts.layers,
            layer_bytes=facts.layer_bytes,
            kv_tokens=self._whole_blocks * self._block_tokens,
            kv_bytes_per_token=facts.row_bytes * facts.layers / self._block_tokens,
            activation_bytes=facts.activation_bytes,
            link_bytes_per_s=self._statistics.link_bytes_per_s,
            latency=self._latency,
        )
        kv_tokens = int(self._pool.num_gpu_blocks) * self._block_tokens
        partners = inbox.partners if inbox.epoch else ()
        self._kv_state.split = SplitState(
            facts.address, shape, inbox.epoch, kv_tokens, inbox.newest_epoch, partners
        )

    def take_counts(self) -> Mapping[str, float]:
        return self._statistics.take_counts()

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        return self._statistics.take_observations()


class OverloadWorker(WorkerSide):
    """Worker side, which passes orders to the worker's `SplitModel`, and its reports back."""

    model: SplitModel  # set by the worker when its KV is allocated

    def __init__(self, context: EngineContext, rank: int) -> None:
        self._counted: Mapping[str, float] = {}

    def take_counts(self) -> Mapping[str, float]:
        """Return the counts since the last call. vLLM calls this in iterations, when no peer's batch runs."""
        if not hasattr(self, "model"):
            return {}
        counts, before = self.model.passes.counts, self._counted
        now = self._counted = {
            "split_batches.own": counts.own,
            "split_batches.peer": counts.served,
            "split_peer_seconds": counts.peer_s,
            "split_idle_seconds": counts.idle_s,
            "split_served_seconds": counts.served_s,
            "split_peer_bytes": counts.peer_bytes,
        }
        return {name: new for name, count in now.items() if (new := count - before.get(name, 0))}

    def before_step(self, order: SplitOrder | None) -> None:
        if isinstance(order, DropOrder):
            self.model.drop(order)
        elif isinstance(order, RestoreOrder):
            self.model.restore(order)

    def report(self) -> SplitReport | None:
        return self.model.take_report()

    def shutdown(self) -> None:
        if hasattr(self, "model"):
            self.model.close()


class OverloadPlugin(Plugin):
    """Plugin that adds the dropping of layers to the connector."""

    name = NAME
    scheduler = OverloadScheduler
    worker = OverloadWorker
    counters = COUNTERS
    histograms = HISTOGRAMS
