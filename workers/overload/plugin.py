"""Dropping on the scheduler's side: the connector's plugin, and vLLM's scheduler between whose steps it acts.

Orders go from the keeper's feed to the worker, at step boundaries, and back what became of them. The pool of
blocks grows, shrinks, and starts over.

While an engine is split, or about to be, no KV is loaded into it or copied from it: transfers, the checkpoint
and parking are fenced off, and what they would have brought is computed. What is under way is waited for.
"""

import copy
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtransfer.connector import StepReports
from kvtransfer.feed import FeedCommand, Reply
from kvtransfer.plugins import EngineContext, Plugin, SchedulerSide, WorkerSide
from kvtransfer.relied_on import verify
from kvtransfer.retention import rank_of
from placement.engines import SplitState
from placement.overload.drop_plan import MOST_ENGINES, EngineShape
from placement.scheduling.interface import IterationPlan
from placement.scheduling.latency_model import LatencyModel, SelfCorrecting
from placement.scheduling.prompts_in_order import TurnsAlone
from workers.coserving.config import CoServingConfig
from workers.coserving.planned import PlannedScheduling, PromptScheduler
from workers.coserving.scheduler import CoServingScheduler
from workers.overload import vllm_internals as internals
from workers.overload.orders import (
    COUNTERS,
    HISTOGRAMS,
    DropOrder,
    NarrowOrder,
    RestoreOrder,
    SplitEvent,
    SplitReport,
    WorkerFacts,
)
from workers.overload.split import SplitModel

logger = logging.getLogger("conserve.workers.overload")

NAME = "overload"
LINK_BYTES_PER_S = 1e9  # between engines: assumed until an exchange has shown it
LINK_SHOWN_BYTES = 1 << 20  # fewer say more of latency
LINK_SHOWN_S = 600.0  # for so long: a plan that a slow exchange forbids is tried again
FENCE_S = 5.0  # for copies and transfers that are under way
EXCHANGE_S = 5.0  # of the link, for KV that the prefix cache has
AGAIN_S, TRIES = 1.0, 3  # of a restore's end: a peer may be late
SplitOrder = DropOrder | NarrowOrder | RestoreOrder
IDLE_S = 0.02  # between steps of an engine that has no requests, and waits for its parameters or KV
MEASURED_EVERY = 32  # iterations: the first of them before anything is known of this engine's time


class LinkRate:
    """How fast KV goes between this engine and its peers, by the last exchange."""

    def __init__(self) -> None:
        self._shown: float | None = None
        self._until = 0.0

    def see(self, nbytes: int, seconds: float, now: float) -> None:
        if nbytes >= LINK_SHOWN_BYTES and seconds > 0:
            self._shown, self._until = nbytes / seconds, now + LINK_SHOWN_S

    def forgets(self, now: float) -> bool:
        """What was shown is too long ago."""
        if self._shown is None or now < self._until:
            return False
        self._shown = None
        return True

    @property
    def bytes_per_s(self) -> float:
        return self._shown or LINK_BYTES_PER_S


class OverloadScheduler(SchedulerSide):
    """Commands come in the feed's thread, all else in the scheduler's."""

    def __init__(self, context: EngineContext) -> None:
        self._residence = context.residence
        context.commands.update(drop=self.drop, restore=self.restore)
        internals.know_the_core()
        self._lock = threading.Lock()
        self._asked: FeedCommand | None = None
        self._asked_at = 0.0
        self._ordered: FeedCommand | None = None
        self._moves: dict[int, int] = {}
        self._gives = False  # KV of the prefix cache is on its way to peers
        self._coming: dict[int, Any] = {}  # blocks whose KV comes home beside serving, with their hashes
        self._restoring: FeedCommand | None = None  # while parameters come back
        self._stood_s = 0.0  # for its beginning
        self._ends_from: float | None = None  # all members have their parameters
        self._tries = 0
        self._epoch = self._newest = 0  # of the split that lasts; of any that was asked for
        self._partners: tuple[str, ...] = ()  # in the last one
        self._whole_blocks = 0
        self._block_tokens = int(context.vllm_config.cache_config.block_size)
        self._facts: WorkerFacts | None = None
        self._latency: LatencyModel | None = None  # of the whole model
        self._pool: Any = None
        self._link = LinkRate()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)

    def bind(self, manager: Any) -> None:
        self._pool = manager.block_pool
        self._whole_blocks = int(self._pool.num_gpu_blocks)

    @property
    def pending(self) -> bool:
        """There is something to do, also for an engine without requests."""
        return self._asked is not None or self._ordered is not None or self.returning

    @property
    def fenced(self) -> bool:
        """Layers are shared, or about to be."""
        return self._residence.fenced

    @property
    def returning(self) -> bool:
        """A restore has begun, and parameters are on their way: nothing to do until a report says more."""
        return self._restoring is not None

    @property
    def steps_anyway(self) -> bool:
        """Without requests too: something will be reported."""
        return self.returning or self._gives

    # Commands

    def drop(self, command: FeedCommand) -> Reply:
        members, part, facts = command.members, command.part, self._facts
        most = min(MOST_ENGINES, facts.layers if facts is not None else 0)
        if not 2 <= len(members) <= most or len(set(members)) < len(members):
            return Reply(error=f"a drop needs 2 to {most} members, each once, and these are {len(members)}")
        if not 0 <= part < len(members) or facts is None or members[part] != facts.address:
            return Reply(error=f"part {part} of these members is not this engine")
        return self._ask(command, 0)

    def restore(self, command: FeedCommand) -> Reply:
        return self._ask(command, command.epoch)

    def _ask(self, command: FeedCommand, in_epoch: int) -> Reply:
        with self._lock:
            if self.pending:
                return Reply(error="a drop or a restore is under way")
            if self._epoch != in_epoch or not command.epoch:
                return Reply(error=f"{command.command} {command.epoch}: the split is {self._epoch or 'none'}")
            self._asked, self._asked_at = command, self._residence.clock()
            self._newest = max(self._newest, command.epoch)
            if command.members:
                self._partners = tuple(one for one in command.members if one != command.members[command.part])
        internals.wake()
        return Reply(True)

    # Steps

    def between_steps(self, scheduler: Any) -> None:
        """Before a step is planned. What was asked for becomes its order, or waits for one after it."""
        asked = self._asked
        if self._coming:
            self._coming = internals.unchanged(self._pool, self._coming)
        if self._link.forgets(self._residence.clock()):
            self._publish()
        if self._ends_from is not None and self._residence.clock() >= self._ends_from:
            self._ordered = self._restoring
            return
        if asked is None:
            return
        if asked.command == "drop":
            self._residence.fenced = True
            if not self._residence.at_rest:
                if self._residence.clock() - self._asked_at > FENCE_S:
                    self._asked = None
                    self._end(SplitEvent.NOT_SPLIT, asked.epoch, "copies or transfers did not end in time")
                return
        elif asked.epoch != self._epoch:
            self._asked = None  # it was lost meanwhile
            return
        elif self._gives:
            return  # for a while: what does not go in time is forgotten
        else:
            self._moves = internals.shrink(scheduler, self._whole_blocks)
        self._ordered, self._asked = asked, None

    def order(self, scheduler_output: Any) -> SplitOrder | None:
        ordered = self._ordered
        if ordered is None:
            return None
        if ordered.command == "drop":
            held, cached = internals.used_blocks(self._pool)
            with self._residence.lock:  # what offline requests gave back was used last, and is wanted least
                ranks = {b: rank_of(self._residence.conversations, self._pool.blocks[b]) for b in cached}
            cached = self._latest(sorted(cached, key=lambda block: -ranks[block]))
            self._gives = bool(cached)
            return DropOrder(ordered.epoch, ordered.members, ordered.part, held, cached)
        if self.returning:
            self._tries += 1
            return self._restore_order(ordered.epoch)
        _, cached = internals.used_blocks(self._pool)
        self._coming = internals.hashes_of(self._pool, cached)
        return NarrowOrder(ordered.epoch, self._moves, cached)

    def _restore_order(self, epoch: int) -> RestoreOrder:
        self._coming = internals.unchanged(self._pool, self._coming)
        held, cached = internals.used_blocks(self._pool)
        wanted = self._latest([block for block in cached if block not in self._coming], len(held))
        used = [block for block in (*held, *wanted) if block not in self._coming]
        return RestoreOrder(epoch, used, last=self._tries >= TRIES)

    def _latest(self, cached: list[int], beside: int = 0) -> list[int]:
        """Of what only the prefix cache has, what was used last: with `beside` other blocks as much as the
        link takes in a while. The rest is forgotten."""
        row_bytes = self._facts.row_bytes * self._facts.layers if self._facts is not None else 0
        most = max(0, int(EXCHANGE_S * self._link.bytes_per_s / max(1, row_bytes)) - beside)
        self._forget(cached[most:])
        return cached[:most]

    def _forget(self, blocks: list[int]) -> None:
        if blocks:
            internals.forget_blocks(self._pool, blocks)
            self._counts["split_forgotten_blocks"] += len(blocks)
            logger.warning("overload forgets %d blocks of the prefix cache", len(blocks))

    def after_step(self, scheduler: Any, report: SplitReport | None) -> None:
        """Before the step's tokens are taken."""
        ordered, self._ordered = self._ordered, None
        if ordered is not None and report is None:
            logger.error("an order came to nothing epoch=%d", self._epoch)
        if report is None:
            return
        if report.facts is not None:
            self._facts = report.facts
            self._publish()
            return
        event = report.event
        if event is SplitEvent.GIVEN:
            self._gives = False
            self._forget(report.rows)
            self._link.see(report.moved_bytes, report.moved_s, self._residence.clock())
            return
        if report.moved_bytes:
            self._counts["split_exchanged_bytes"] += report.moved_bytes
            self._counts["split_exchange_seconds"] += report.moved_s
            self._link.see(report.moved_bytes, report.moved_s, self._residence.clock())
        if event is SplitEvent.LOADED:
            self._seconds["return_seconds"].append(report.seconds)
            come = set(report.rows)
            self._coming = {block: was for block, was in self._coming.items() if block in come}
            self._ends_from = self._residence.clock()
            return
        if event is SplitEvent.NARROWED:
            self._restoring, self._stood_s, self._tries = ordered, report.seconds, 0
            self._publish()
            return
        dropped = event in (SplitEvent.SPLIT, SplitEvent.NOT_SPLIT)
        stood_s, self._stood_s = report.seconds + self._stood_s, 0.0
        self._seconds["drop_seconds" if dropped else "restore_seconds"].append(stood_s)
        if event is SplitEvent.LOST:
            internals.start_over(scheduler, self._whole_blocks)
        elif event in (SplitEvent.SPLIT, SplitEvent.NOT_RESTORED):
            internals.grow(scheduler, report.blocks)
        self._end(event, report.epoch, report.why)

    def _end(self, event: SplitEvent, epoch: int, why: str) -> None:
        split = event in (SplitEvent.SPLIT, SplitEvent.NOT_RESTORED)
        self._residence.fenced = split
        self._epoch = epoch if split else 0
        self._coming = self._coming if split else {}
        self._gives = self._gives and event is SplitEvent.SPLIT
        late = event is SplitEvent.NOT_RESTORED and self.returning
        self._restoring = self._restoring if late else None
        self._ends_from = self._residence.clock() + AGAIN_S if late else None
        self._counts[f"splits.{event}"] += 1
        self._publish()
        as_wanted = event in (SplitEvent.SPLIT, SplitEvent.RESTORED)
        said = "overload %s epoch=%d blocks=%d why=%r"
        logger.log(
            logging.INFO if as_wanted else logging.WARNING, said, event, epoch, self._pool.num_gpu_blocks, why
        )

    def measured(self, latency: LatencyModel) -> None:
        """By the scheduler, after a step: how long steps take."""
        if not self._epoch and latency != self._latency:
            self._latency = latency
            self._publish()

    def _publish(self) -> None:
        """To who plans: what could give way here."""
        facts = self._facts
        if facts is None:
            return
        whole = self._whole_blocks * self._block_tokens
        per_token = facts.row_bytes * facts.layers / self._block_tokens
        shape = EngineShape(
            *(facts.layers, facts.layer_bytes, whole, per_token, facts.activation_bytes),
            *(self._link.bytes_per_s, self._latency),
        )
        now = int(self._pool.num_gpu_blocks) * self._block_tokens
        partners = self._partners if self._epoch else ()
        self._residence.split = SplitState(facts.address, shape, self._epoch, now, self._newest, partners)

    def take_counts(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, defaultdict(float)
        return counts

    def take_observations(self) -> Mapping[str, Sequence[float]]:
        seconds, self._seconds = self._seconds, defaultdict(list)
        return seconds


class OverloadWorker(WorkerSide):
    split: SplitModel  # the worker's own, which it sets

    def __init__(self, context: EngineContext, rank: int) -> None:
        self._counted: Mapping[str, float] = {}

    def take_counts(self) -> Mapping[str, float]:
        """Within a step, so that no batch of the peer's is counted meanwhile."""
        if not hasattr(self, "split"):
            return {}
        tally, link, before = self.split.passes.tally, self.split.link, self._counted
        now = self._counted = {
            "split_batches.own": tally.passes,
            "split_batches.peer": tally.served,
            "split_peer_seconds": tally.peer_s,
            "split_idle_seconds": tally.idle_s,
            "split_served_seconds": tally.served_s,
            "split_peer_bytes": tally.peer_bytes,
            "split_beside_bytes": link.beside_bytes,
            "split_beside_wait_seconds": link.waits_s,
        }
        new = {name: count - before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in new.items() if count}

    def before_step(self, order: SplitOrder | None) -> None:
        match order:
            case DropOrder():
                self.split.drop(order)
            case NarrowOrder():
                self.split.narrow(order)
            case RestoreOrder():
                self.split.restore(order)

    def report(self) -> SplitReport | None:
        return self.split.take_report()

    def shutdown(self) -> None:
        if hasattr(self, "split"):
            self.split.close()


class OverloadPlugin(Plugin):
    name = NAME
    scheduler = OverloadScheduler
    worker = OverloadWorker
    counters = COUNTERS
    histograms = HISTOGRAMS


class DroppingScheduling(PlannedScheduling):
    """In front of one of our schedulers, without asynchronous scheduling: no step is planned while one
    runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify(internals.SCHEDULING)
        super().__init__(*args, **kwargs)
        side = self.plugin(NAME)
        assert isinstance(side, OverloadScheduler), "the connector has no overload plugin"
        self._overload = side
        self._whole: SelfCorrecting | None = None  # what is known of the whole model, while layers are shared

    def unsupported(self) -> dict[str, bool]:
        overlaps = self.vllm_config.scheduler_config.async_scheduling
        return {
            **super().unsupported(),
            "asynchronous scheduling (start with --no-async-scheduling)": overlaps,
        }

    def has_requests(self) -> bool:
        has = bool(super().has_requests())  # type: ignore[misc]
        return has or self._overload.pending or self._overload.steps_anyway

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self._overload.steps_anyway and not self.requests:
            time.sleep(IDLE_S)
        self._overload.between_steps(self)
        self._keep_apart()
        return super().schedule(throttle_prefills)  # type: ignore[misc]

    def _keep_apart(self) -> None:
        """What steps with a part of the layers take says nothing of those with all."""
        if self._overload.fenced and self._whole is None:
            self._whole, self.latency = self.latency, copy.deepcopy(self.latency)
        elif self._whole is not None and not self._overload.fenced:
            self.latency, self._whole = self._whole, None
            self.report_curve(self.clock())

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._overload.after_step(self, _report_in(model_runner_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._keep_apart()
        if self.latency.observed % MEASURED_EVERY == 0 and self.latency.observed:
            self._overload.measured(self.latency.model)
        return outputs


class DroppingScheduler(DroppingScheduling, PromptScheduler):
    """For vLLM's `--scheduler-cls`, without co-serving."""


class CoServingDroppingScheduler(DroppingScheduling, CoServingScheduler):
    """With it. While layers are shared no iteration ends at a safepoint, and offline requests wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = CoServingConfig.from_additional_config(self.vllm_config.additional_config).serving
        self._with_all_layers, self._shared = self.policy, TurnsAlone(settings)

    def needs_plan(self) -> bool:
        fenced = self._overload.fenced
        self.policy = self._shared if fenced else self._with_all_layers
        if fenced and not (self.running or self._overload.pending or any(self.tracked.online())):
            time.sleep(IDLE_S)
        return super().needs_plan()

    def carry_out(self, plan: IterationPlan, now: float) -> None:
        super().carry_out(plan, now)
        if self._overload.fenced:
            self.waiting.name_offline(self.restores.waiting)  # they end: nothing is brought back


def _report_in(model_runner_output: Any) -> SplitReport | None:
    meta = internals.connector_meta(model_runner_output)
    report = meta.reports.get(NAME) if isinstance(meta, StepReports) else None
    assert report is None or isinstance(report, SplitReport)
    return report
