"""Scheduler of a co-serving engine: arms iterations, and rolls aborted ones back."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvtransfer.compat.block_cache import notify_of_arrivals
from placement.scheduling.interface import DecodingView, IterationPlan, RequestView
from placement.scheduling.latency_model import BatchWork
from workers.engine.compat import coserving_scheduler as internals
from workers.engine.compat.engine_core_patches import keep_armed_steps_alone
from workers.engine.coserving import rollback, safepoint
from workers.engine.coserving.arrivals import ArrivalWatch
from workers.engine.coserving.iterations import IterationRecord, PendingIteration, count, observe
from workers.engine.coserving.planned import PlannedScheduling
from workers.engine.coserving.requests import queue_weight_of, slo_of


class CoServingScheduler(PlannedScheduling, internals.OpenScheduler):
    """Scheduler with co-serving, for vLLM's `--scheduler-cls` with `--scheduling-policy priority`."""

    coserves = True
    rollback_steps = rollback.STEPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._safepoint: safepoint.SafepointScheduler | None = self.plugin(safepoint.NAME)
        self.iteration: PendingIteration | None = None  # armed iteration without a result yet
        self._online_s = 0.0  # predicted time of the current plan's online requests alone
        self._offline_prompts_arm = False  # whether an iteration full of offline tokens is worth arming
        self._watch: ArrivalWatch | None = None
        if self._safepoint is not None:
            self._safepoint.worth_arming = self._worth_arming
            keep_armed_steps_alone()
            self._watch = ArrivalWatch(
                lambda: self.policy, self._safepoint.flag, lambda: self.latency.model, self._arriving
            )
            notify_of_arrivals(self._watch.on_arrival)

    @property
    def armed_step_runs(self) -> bool:
        return self.iteration is not None

    def waits_for_result(self) -> bool:
        """Return whether the next iteration may be worth arming; it then waits for the one in flight."""
        if not self._offline_prompts_arm or self._safepoint is None or not self._safepoint.arms:
            return False
        return self.needs_plan() and bool(self.guarded(self._offline_prompt_may_run))

    def needs_plan(self) -> bool:
        if not super().needs_plan():
            return False
        if self.waits_or_prefills() or not self.guarded(self._decodes_need_no_plan):
            return True
        if self.checkpoint is not None:
            self.checkpoint.offline_may_start = True  # a plan would set it too, as so much memory is free
        return False

    def _decodes_need_no_plan(self) -> bool:
        """Return whether this iteration needs no plan. Nothing may wait, and all requests must decode."""
        pool, last, due_in_s, tbt_s = self.kv_cache_manager.block_pool, self.decoding, math.inf, math.inf
        online = offline = BatchWork()
        if self.tracked.offline_count:
            if last is None or not self.tracked.served_together:
                return False  # the last iteration was not a decoding batch, so its sums are not known
            online, offline = last.online.next_tokens(), last.offline.next_tokens()
            due_in_s, tbt_s = self.tracked.until_due(self.clock()), last.tbt_s
        most = len(self.running) * len(self.managers)
        free, total = int(pool.get_num_free_blocks()), int(pool.num_gpu_blocks)
        view = DecodingView(online, offline, due_in_s, tbt_s, most, free, total)
        return self.policy.needs_no_plan(view, self.latency.model)

    def _offline_prompt_may_run(self) -> bool:
        offline = [request for request in self.running if request.priority > 0]
        if any(map(internals.has_prompt_left, offline)):
            return True
        return self.tracked.offline_count > len(offline) and len(self.running) < self.max_num_active_reqs

    def _worth_arming(self) -> float:
        """Return the predicted seconds of the iteration being scheduled, or 0 if it is not worth arming."""
        if self.builder is None or self.under_way:
            return 0.0
        seconds = self.latency.model.seconds(self.builder.work)
        offline = self.builder.offline_tokens and self.policy.worth_arming(seconds, self._online_s)
        return seconds if offline else 0.0

    def began(self, iteration: PendingIteration) -> None:
        if iteration.epoch:
            self.iteration = iteration
        self._publish(iteration)

    def before_preemption(self, request: Any) -> None:
        tracked = self.tracked.by_id.get(request.request_id)
        if tracked is not None:
            tracked.held = max(tracked.held, request.num_computed_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.settle_abort()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.iteration = None
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        # A client may disconnect before the iteration's result is taken. The roll-back comes first, because
        # the request's blocks are about to be kept or freed.
        self.settle_abort()
        return super().finish_requests(request_ids, finished_status)

    def settle_abort(self) -> PendingIteration | None:
        """Roll the armed iteration back if the workers aborted it; later calls change nothing."""
        iteration = self.iteration
        if iteration is None or iteration.aborted:
            return iteration
        if self._watch is not None:
            self._watch.in_flight = None
        if self._safepoint is not None and self._safepoint.flag.aborted(iteration.epoch):
            iteration.disowned = rollback.roll_back(iteration.scheduled, self, self.rollback_steps)
            iteration.aborted = True
        return iteration

    def carry_out(self, plan: IterationPlan, now: float) -> None:
        builder, budget = plan.builder, self.budget
        self._online_s = builder.model.seconds(builder.work) if builder.work.requests else 0.0
        filled_s = builder.model.seconds(builder.work.plus(budget, 0)) if budget > 0 else 0.0
        self._offline_prompts_arm = self.policy.worth_arming(filled_s, self._online_s)
        if self.checkpoint is not None:  # vLLM loads KV from the host without asking the policy
            self.checkpoint.offline_may_start = plan.builder.admit_waiting
        if plan.builder.admit_waiting:
            started = self.tracked.start_order(self.policy, self.max_num_active_reqs, internals.is_waiting)
            self.waiting.name_offline(started)

    def epoch_of(self, output: Any) -> int:
        return self._safepoint.armed if self._safepoint is not None else 0

    def count_unplanned(self) -> None:
        if self._safepoint is not None:
            self._safepoint.counts["coserving_unplanned"] += 1

    def _arriving(self, request: Any, now: float) -> RequestView:
        """Return an arriving request as the policy sees it, in the thread that receives requests."""
        arguments = internals.extra_args(request)
        return RequestView(
            request.request_id,
            offline=False,
            arrival=now,
            tokens=request.num_tokens,
            computed=self.cached_tokens(request),
            slo=slo_of(arguments, self.tracked.default_slo),
            queue_weight=queue_weight_of(arguments),
        )

    def _publish(self, iteration: PendingIteration) -> None:
        if self._watch is None:
            return
        if not iteration.epoch:  # it cannot be aborted
            self._watch.in_flight = None
            return
        queued = BatchWork()
        for tracked in self.tracked.online():
            request = tracked.request
            left = request.num_tokens - request.num_computed_tokens  # after this iteration, if it runs
            if left > 0 and (internals.is_waiting(request) or internals.is_running(request)):
                queued = queued.plus(left, request.num_computed_tokens)
        iteration.queued = queued
        self._watch.in_flight = iteration

    def count(self, iteration: PendingIteration, seconds: float, late: int) -> None:
        side = self._safepoint
        if side is not None and self._watch is not None:
            count(iteration, side.counts, seconds, late)
            observe(iteration, side.observations, seconds, side.flag.abort_wait_s())
            side.counts.update(self._watch.take_counts())

    def entry(self, iteration: PendingIteration, now: float, seconds: float, late: int) -> IterationRecord:
        record = super().entry(iteration, now, seconds, late)
        if not iteration.aborted or self._safepoint is None:
            return record
        flag = self._safepoint.flag
        return replace(
            record,
            abort_layer=flag.fields[safepoint.ABORTED_LAYER],
            signal_to_abort_s=flag.abort_wait_s(),
            check_gap_s=flag.fields[safepoint.GAP_NS] / 1e9,
            disowned_blocks=iteration.disowned,
        )
