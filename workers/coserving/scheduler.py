"""vLLM's scheduler with a policy in it: translates its state, lets the policy decide, carries it out.

Decisions are in placement/iteration/. What an iteration did is undone in rollback.py. Nothing here decides.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import scipy.optimize  # noqa: F401  what the first correction of the model needs; it must not wait for it then

from kvtransfer.vllm_internals import verify
from placement.iteration.interface import (
    BatchBuilder,
    EngineView,
    IterationDone,
    RequestView,
    RunningBatch,
    ServingSettings,
)
from placement.iteration.latency import BatchWork, LatencyModel, SelfCorrecting
from placement.iteration.policies import make_policy
from workers.coserving import rollback, safepoint
from workers.coserving import vllm_internals as internals
from workers.coserving.config import CoServingConfig, key_of, starting_model
from workers.coserving.iterations import (
    IterationLog,
    IterationRecord,
    PendingIteration,
    ScheduledRequest,
    count,
    observe,
)
from workers.coserving.requests import ArrivalWatch, TrackedRequests, slo_of

log = logging.getLogger("conserve.workers.coserving.scheduler")

Step = TypeVar("Step")


class CoServingScheduler(internals.OpenScheduler):
    """For vLLM's `--scheduler-cls`; needs `--scheduling-policy priority`. Priority above 0 means offline."""

    rollback_steps = rollback.STEPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify(internals.SCHEDULING)
        super().__init__(*args, **kwargs)
        config = CoServingConfig.from_additional_config(self.vllm_config.additional_config)
        self._policy = make_policy(config.serving)
        model = starting_model(config, key_of(self.vllm_config.model_config.model))
        self._latency = SelfCorrecting(model)
        self._checkpoint = self.plugin("checkpoint")
        self._safepoint: safepoint.SafepointScheduler | None = self.plugin(safepoint.NAME)
        self._tracked = TrackedRequests(
            config.serving.slo,
            internals.extra_args,
            self.blocks_held,
            self._saved_blocks,
            self._restore_blocks,
        )
        self._log = IterationLog(config.iteration_log)
        self._builder: BatchBuilder | None = None
        self._budget = 0
        self._unplanned = 0
        self.iteration: PendingIteration | None = None  # between its scheduling and its result
        self._watch: ArrivalWatch | None = None
        if self._safepoint is not None:
            self._watch = ArrivalWatch(
                self._policy, self._safepoint.flag, lambda: self._latency.model, self._arriving
            )
            internals.tell_of_arrivals(self._watch.on_arrival)

    def serve_by(self, settings: ServingSettings, model: LatencyModel) -> None:
        """From the next iteration on: a policy that has seen nothing, and a model not corrected yet."""
        self._policy = make_policy(settings)
        self._latency = SelfCorrecting(model)
        self._tracked.default_slo = settings.slo
        if self._watch is not None:
            self._watch.policy = self._policy

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._tracked.add(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        started = time.monotonic()
        preempted = self._guarded(self._carry_out_plan, started) or 0
        running_before = {request.request_id for request in self.running}
        output = super().schedule(throttle_prefills)
        self._builder = None
        if output.total_num_scheduled_tokens:
            self.iteration = self._guarded(self._note, output, started, running_before, preempted)
            if self.iteration is not None:
                self._guarded(self._publish, self.iteration)
        return output

    def _guarded(self, step: Callable[..., Step], *args: Any) -> Step | None:
        """A step of ours around vLLM's schedule. When it fails, vLLM's own rules hold for this iteration."""
        try:
            return step(*args)
        except Exception:
            self._builder, self._budget = None, 0
            if self._safepoint is not None:
                self._safepoint.counts["coserving_unplanned"] += 1
            self._unplanned += 1
            if self._unplanned.bit_count() == 1:  # 1, 2, 4, ...: it may fail with every iteration
                how = "iteration not planned, vLLM's own schedule is used step=%s times=%d"
                log.exception(how, step.__name__, self._unplanned)
            return None

    def tokens_for(self, request: Any, computed: int, tokens: int) -> int:
        tracked = self._tracked.by_id.get(request.request_id)
        if tokens <= 0 or self._builder is None or tracked is None:
            return tokens
        view = self._tracked.view(tracked, internals.is_running(request), computed)
        granted = self._guarded(self._builder.take, view, tokens)
        return tokens if granted is None else granted

    def before_preemption(self, request: Any) -> None:
        tracked = self._tracked.by_id.get(request.request_id)
        if tracked is not None:
            tracked.held = max(tracked.held, request.num_computed_tokens)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        iteration = self.settle_abort()
        requests = [request for request, _ in self.scheduled_requests(scheduler_output)]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if iteration is not None:
            self._guarded(self._account, iteration, requests)
        for request in requests:
            if request.is_finished():
                self._tracked.drop(request.request_id)
        self.iteration = None
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        # A client that hangs up ends its request before the iteration's result is taken. What an aborted
        # iteration registered for it must be disowned first: its blocks are about to be kept or freed.
        self.settle_abort()
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._tracked.drop(request.request_id)
        return ended

    def settle_abort(self) -> PendingIteration | None:
        """Undoes the current iteration if the workers left it early. Once, whoever asks first."""
        iteration = self.iteration
        if iteration is None or not iteration.epoch or iteration.aborted:
            return iteration
        if self._watch is not None:
            self._watch.in_flight = None
        if self._safepoint is not None and self._safepoint.flag.aborted(iteration.epoch):
            iteration.disowned = rollback.roll_back(iteration.scheduled, self, self.rollback_steps)
            iteration.aborted = True
        return iteration

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()

    def _carry_out_plan(self, now: float) -> int:
        self._builder, self._budget = None, 0
        if self.pause_state.value:  # paused: vLLM's own rules
            return 0
        plan = self._policy.plan(self._view(now), self._latency.model)
        by_key = {request.request_id: request for request in self.running}
        for key in plan.preempt:
            self.preempt(by_key.pop(key), now)
        self.running = [by_key[key] for key in plan.order]
        self._builder, self._budget = plan.builder, plan.builder.offline_budget()
        if self._checkpoint is not None:  # vLLM does not ask before it loads KV from the host
            self._checkpoint.offline_may_start = plan.builder.admit_waiting
        if plan.builder.admit_waiting:
            self.waiting.name_offline(
                self._tracked.start_order(self._policy, self.max_num_active_reqs, internals.is_waiting)
            )
        return len(plan.preempt)

    def _view(self, now: float) -> EngineView:
        tracked = self._tracked
        known = [(request, tracked.by_id.get(request.request_id)) for request in self.running]
        running = tuple(tracked.view(one or tracked.add(request), True) for request, one in known)
        waiting = tuple(
            tracked.view(one, False, self._computed_if_started(one.request))
            for one in tracked.online()
            if internals.is_waiting(one.request)
        )
        pool = self.kv_cache_manager.block_pool
        head = next(tracked.offline_waiting(self.max_num_active_reqs, internals.is_waiting), None)
        return EngineView(
            now=now,
            running=running,
            online_waiting=waiting,
            offline_waiting=tracked.offline_count - sum(request.offline for request in running),
            offline_head=tracked.view(head, False) if head is not None else None,
            free_blocks=int(pool.get_num_free_blocks()),
            total_blocks=int(pool.num_gpu_blocks),
            block_tokens=int(self.block_size),
            max_tokens=self.max_num_scheduled_tokens,
            max_running=self.max_num_active_reqs,
        )

    def _computed_if_started(self, request: Any) -> int:
        return int(request.num_computed_tokens) or self.cached_tokens(request)

    def _saved_blocks(self, request: Any) -> int:
        return int(self._checkpoint.saved_blocks(request.request_id)) if self._checkpoint is not None else 0

    def _restore_blocks(self, request: Any) -> int:
        if self._checkpoint is None:
            return 0
        return int(self._checkpoint.restorable_blocks(request, self._computed_if_started(request)))

    def _arriving(self, request: Any, now: float) -> RequestView:
        """In the receiving thread."""
        return RequestView(
            request.request_id,
            offline=False,
            arrival=now,
            tokens=request.num_tokens,
            computed=self.cached_tokens(request),
            slo=slo_of(internals.extra_args(request), self._tracked.default_slo),
        )

    def _note(
        self, output: Any, started: float, running_before: set[str], preempted: int
    ) -> PendingIteration:
        epoch = self._safepoint.armed if self._safepoint is not None else 0
        work, online_work, online_requests, offline_requests = BatchWork(), BatchWork(), 0, 0
        slack: float | None = None
        scheduled: list[ScheduledRequest] = []
        offline_tokens = again = 0
        for request, tokens in self.scheduled_requests(output):
            tracked = self._tracked.by_id[request.request_id]
            context = request.num_computed_tokens - tokens
            work = work.plus(tokens, context)
            if request.priority > 0:
                offline_requests += 1
                offline_tokens += tokens
            else:
                online_requests += 1
                online_work = online_work.plus(tokens, context)
                left = tracked.deadline - started
                slack = left if slack is None else min(slack, left)
            admitted = request.request_id not in running_before
            if admitted:
                tracked.adopted = self.full_blocks(context)
                again += max(tracked.held - context, 0) if tracked.offline else 0
                tracked.held = 0
            if epoch:
                scheduled.append(self.noted(request, tokens, tracked.adopted, admitted))
        seconds = self._latency.model.seconds(work)
        batch = RunningBatch(work, online_work, offline_requests, online_requests, seconds, 0.0, slack)
        return PendingIteration(
            started, batch, epoch, tuple(scheduled), offline_tokens, preempted, self._budget, again
        )

    def _publish(self, iteration: PendingIteration) -> None:
        if self._watch is None:
            return
        queued = BatchWork()
        for tracked in self._tracked.online():
            request = tracked.request
            left = request.num_tokens - request.num_computed_tokens  # of running ones: after this iteration
            if left > 0 and (internals.is_waiting(request) or internals.is_running(request)):
                queued = queued.plus(left, request.num_computed_tokens)
        iteration.queued = queued
        self._watch.in_flight = iteration if iteration.epoch else None

    def _account(self, iteration: PendingIteration, requests: list[Any]) -> None:
        now = time.monotonic()
        seconds = now - iteration.started
        late = 0
        if not iteration.aborted:
            late = sum(self._tracked.served(request, now) for request in requests)
            self._latency.observe(iteration.batch.work, seconds)
        batch = iteration.batch
        self._policy.observe(
            IterationDone(
                now, batch.work, batch.seconds, seconds, batch.online_requests, batch.offline_requests, late,
                iteration.aborted,
            )
        )  # fmt: skip
        side = self._safepoint
        if side is not None and self._watch is not None:
            count(iteration, side.counts, seconds, late)
            observe(iteration, side.observations, seconds, side.flag.abort_wait_s())
            side.counts.update(self._watch.take_counts())
        self._log.write(self._record(iteration, now, seconds, late))

    def _record(self, iteration: PendingIteration, now: float, seconds: float, late: int) -> IterationRecord:
        batch, work = iteration.batch, iteration.batch.work
        aborted: dict[str, Any] = {}
        if iteration.aborted and self._safepoint is not None:
            flag = self._safepoint.flag
            aborted = {
                "abort_layer": flag.fields[safepoint.ABORTED_LAYER],
                "signal_to_abort_s": flag.abort_wait_s(),
                "check_gap_s": flag.fields[safepoint.GAP_NS] / 1e9,
                "disowned_blocks": iteration.disowned,
            }
        return IterationRecord(
            at=now, seconds=seconds, predicted_s=batch.seconds, new_tokens=work.new_tokens,
            attended=work.attended, context=work.context, online_requests=batch.online_requests,
            offline_requests=batch.offline_requests, offline_tokens=iteration.offline_tokens,
            preempted=iteration.preempted, late_requests=late, aborted=iteration.aborted,
            again_tokens=iteration.again_tokens, before=work.before, **aborted,
        )  # fmt: skip
