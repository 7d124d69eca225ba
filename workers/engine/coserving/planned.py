"""Extension of vLLM's scheduler by a policy: shows it the engine's state, and carries out its plan.

The policies are in placement/scheduling/.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from typing import Any, TypeVar

import scipy.optimize  # noqa: F401  imported early, so that the first correction of the model does not wait
from vllm.platforms import current_platform

from kvtransfer.compat.relied_on import verify
from kvtransfer.request_facts import admitted_now
from placement.scheduling.interface import (
    BatchBuilder,
    EngineView,
    IterationPlan,
    RequestView,
    RunningBatch,
)
from placement.scheduling.latency_model import PROMPT_TOKENS, BatchWork, LatencyModel, SelfCorrecting
from placement.scheduling.policy_registry import make_policy
from placement.scheduling.prefill_curve import curve_of
from placement.scheduling.prompt_order import PromptSharing
from workers.engine.compat import coserving_scheduler as internals
from workers.engine.compat import cpu_build
from workers.engine.compat.grammar_advance import GRAMMARS, advance_grammars
from workers.engine.coserving.config import CoServingConfig
from workers.engine.coserving.iterations import (
    DecodingBatch,
    IterationLog,
    IterationRecord,
    PendingIteration,
    ScheduledRequest,
)
from workers.engine.coserving.requests import TrackedRequest, TrackedRequests
from workers.engine.coserving.starting_model import guess_of, key_of, starting_model
from workers.engine.overload.config import split_scheduling

log = logging.getLogger("conserve.workers.coserving.planned")

Step = TypeVar("Step")

CURVE_S = 1.0  # least time between reports of the prefill curve, which takes milliseconds to compute
LOOK_UP_S = 0.5  # how long a look-up of a waiting prompt's cached tokens is valid


class PlannedScheduling(internals.OpenScheduling):
    """Mixin that lets a policy plan the iterations of vLLM's schedulers.

    A request with a priority above 0 is offline.
    """

    clock = staticmethod(time.monotonic)
    coserves = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verify(internals.SCHEDULING)
        verify(GRAMMARS)
        advance_grammars()
        if current_platform.is_cpu():
            verify(cpu_build.SPINNING)
            cpu_build.nap_instead_of_spinning()
        super().__init__(*args, **kwargs)
        config = self.adapted(CoServingConfig.from_additional_config(self.vllm_config.additional_config))
        self.policy = make_policy(config.serving)
        key = key_of(self.vllm_config, config.power_cap_w)
        guess = guess_of(self.vllm_config, key.hardware)
        self.latency = SelfCorrecting(starting_model(config, key, guess))
        self._planned = config.planned
        self.checkpoint = self.plugin("checkpoint")
        self._transfer = self.plugin("transfer")
        self._report = self.plugin("report")
        self.tracked = TrackedRequests(
            config.serving.slo,
            internals.extra_args,
            self.blocks_held,
            self._saved_blocks,
            self._restore_blocks,
            self.clock,
        )
        if self._report is not None:
            self._report.account_for("steps in flight", self.deferred_blocks)
        self._log = IterationLog(config.iteration_log)
        self.builder: BatchBuilder | None = None
        self._views: dict[str, RequestView] = {}  # running requests as the current plan saw them
        self._unplanned = 0
        self.budget = 0  # offline tokens that fit into the iteration planned last
        # `id` of vLLM's scheduler output -> iteration, because iterations may overlap. The iteration is None
        # if it is empty, or if recording it failed.
        self.under_way: dict[int, PendingIteration | None] = {}
        self.decoding: DecodingBatch | None = None  # batch of the last iteration, if all requests decoded
        self._ended = 0.0  # when the last iteration ended
        self._reported: LatencyModel | None = None  # model whose prefill curve was reported last
        self._curve_at = 0.0  # when the curve was reported last
        self.report_curve(0.0)
        self.sharing = split_scheduling(self, config.serving)

    def adapted(self, config: CoServingConfig) -> CoServingConfig:
        """Return `config`, or a copy with the changes that this kind of scheduler needs."""
        return config

    def has_requests(self) -> bool:
        pending = self.sharing is not None and self.sharing.pending
        return bool(super().has_requests()) or pending  # type: ignore[misc]

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)  # type: ignore[misc]
        if not known:
            self.tracked.add(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self.tracked.drop(request.request_id)
        return ended

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self.sharing is not None:
            self.sharing.before_step()
        output, iteration = self.planned_step(throttle_prefills)
        if iteration is not None:
            iteration.overlapped = bool(self.under_way)
        self.under_way[id(output)] = iteration
        if iteration is not None:
            self.guarded(self.began, iteration)
        return output

    def began(self, iteration: PendingIteration) -> None:
        """Hook that is called when an iteration was scheduled and is about to run."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        iteration = self.under_way.pop(id(scheduler_output), None)
        again = iteration is not None and iteration.repeats and self.tracked.served_together
        requests = None if again else [request for request, _ in self.scheduled_requests(scheduler_output)]
        if self.sharing is not None:
            self.sharing.before_result(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if iteration is not None:
            self.guarded(self.ended, iteration, requests)
        if self.sharing is not None:
            self.sharing.after_result()
        self.drop_finished()
        return outputs

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()  # type: ignore[misc]

    def planned_step(self, throttle_prefills: bool) -> tuple[Any, PendingIteration | None]:
        """Schedule an iteration by the policy's plan; return vLLM's output and the record of the iteration.

        The record is None if nothing was scheduled.
        """
        started = self.clock()
        self.let_holders_go_first()
        plan = self.guarded(self._plan, started)
        self.ask_policy(plan is not None)
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        self.builder = None
        self._views = {}
        if plan is not None:
            self.guarded(self._mark_refused, plan)
        if not output.total_num_scheduled_tokens:
            return output, None
        iteration = self.guarded(self._recorded, output, started)
        if plan is not None and iteration is not None:
            iteration.preempted = len(plan.preempt)
            iteration.budget_tokens = self.budget
        return output, iteration

    def tokens_for(self, request: Any, computed: int, tokens: int) -> int:
        tracked = self.tracked.by_id.get(request.request_id)
        if tokens <= 0 or self.builder is None or tracked is None:
            return tokens
        view = self._views.get(request.request_id)
        if view is None or view.computed != computed or not internals.is_running(request):
            view = self.tracked.view(tracked, internals.is_running(request), computed)
        taken = self.guarded(self.builder.take, view, tokens)
        if taken == 0 and not view.running and view.blocks:
            # The request waits with loaded KV. vLLM looks at these requests first and stops at the first that
            # gets no tokens, so that no request behind it would ever start.
            return 1
        # Some models attend within an image in both directions, so vLLM decides where to cut such a prompt.
        return tokens if taken is None or (taken and request.mm_features) else taken

    def guarded(self, step: Callable[..., Step], *args: Any) -> Step | None:
        """Return `step(*args)`, or None if it fails; then vLLM's own rules schedule this iteration."""
        try:
            return step(*args)
        except Exception:
            self.builder, self.budget = None, 0
            self.count_unplanned()
            self._unplanned += 1
            if self._unplanned.bit_count() == 1:  # log the failures 1, 2, 4, ..., as every iteration may fail
                text = "iteration not planned, vLLM's own schedule is used step=%s times=%d"
                log.exception(text, step.__name__, self._unplanned)
            return None

    def count_unplanned(self) -> None:
        if self._report is not None:
            self._report.counts["prompts_unplanned"] += 1

    def needs_plan(self) -> bool:
        return self._planned and not self.pause_state.value  # paused: vLLM's own rules

    def carry_out(self, plan: IterationPlan, now: float) -> None:
        """Hook that carries out the parts of a plan other than the order and the tokens of requests."""

    def _plan(self, now: float) -> IterationPlan | None:
        if not self.needs_plan():
            return None
        view = self.engine_view(now)
        plan = self.policy.plan(view, self.latency.model)
        self.budget = plan.builder.offline_budget()
        by_key = {request.request_id: request for request in self.running}
        self._views = {request.key: request for request in view.running}
        for key in plan.preempt:
            self.preempt(by_key.pop(key), now)
            del self._views[key]
        self.running = [by_key[key] for key in plan.order]
        if plan.waiting is not None:
            self.waiting.name_online(self.requests[key] for key in plan.waiting)
        self.builder = plan.builder
        self.carry_out(plan, now)
        return plan

    def engine_view(self, now: float) -> EngineView:
        tracked = self.tracked
        tracked.settle()
        known = [(request, tracked.by_id.get(request.request_id)) for request in self.running]
        running = tuple(tracked.view(one or tracked.add(request), True) for request, one in known)
        waiting = tuple(
            tracked.view(one, False, self._computed_if_started(one))
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

    def _computed_if_started(self, tracked: TrackedRequest) -> int:
        """Return how many tokens a waiting request would start with: cached, on the host, or transferred."""
        request = tracked.request
        if request.num_computed_tokens:
            return int(request.num_computed_tokens)
        now = self.clock()
        if now >= tracked.looked_up + LOOK_UP_S:
            tracked.looked_up, tracked.available = now, self._available(request)
        return tracked.available

    def _available(self, request: Any) -> int:
        cached = self.cached_tokens(request)
        if self._transfer is not None and (match := self._transfer.match(request, cached)) is not None:
            cached += match.tokens
        elif self.checkpoint is not None:
            cached += int(self.checkpoint.restorable_blocks(request, cached)) * int(self.block_size)
        return min(cached, int(request.num_tokens) - 1)

    def _saved_blocks(self, request: Any) -> int:
        return int(self.checkpoint.saved_blocks(request.request_id)) if self.checkpoint is not None else 0

    def _restore_blocks(self, request: Any) -> int:
        if self.checkpoint is None:
            return 0
        return int(self.checkpoint.restorable_blocks(request, self.cached_tokens(request)))

    def _mark_refused(self, plan: IterationPlan) -> None:
        """Mark the prompts that the plan gave tokens, but that did not start for lack of memory or slots."""
        for key in plan.waiting or ():
            tracked = self.tracked.by_id.get(key)
            if tracked is None or plan.builder.caps.get(key, 1) == 0:
                continue
            tracked.refused = internals.is_waiting(tracked.request)

    def epoch_of(self, output: Any) -> int:
        """Return the epoch of an iteration that may be aborted, or 0 for any other iteration."""
        return 0

    def _recorded(self, output: Any, started: float) -> PendingIteration:
        epoch, last, self.decoding = self.epoch_of(output), self.decoding, None
        if last is not None and not epoch and last.is_repeated_by(output):
            self.decoding = last.next()
            return self.decoding.iteration(self.latency.model, started)
        self.tracked.settle()
        just_admitted = admitted_now(output)
        # Pairs of new tokens and context, one for each request.
        online: list[tuple[int, int]] = []
        offline: list[tuple[int, int]] = []
        decoding: list[tuple[int, int]] = []
        prompt_tokens = again = offline_prompts = 0
        slack = tightest = math.inf
        scheduled: list[ScheduledRequest] = []
        by_id = self.tracked.by_id
        for request, tokens in self.scheduled_requests(output):
            tracked = by_id[request.request_id]
            context = request.num_computed_tokens - tokens
            decodes = context >= request.num_prompt_tokens
            if tracked.offline:
                offline.append((tokens, context))
                offline_prompts += not decodes
            else:
                if decodes:
                    decoding.append((tokens, context))
                    tightest = min(tightest, tracked.slo.tbt_s)
                else:
                    prompt_tokens += tokens
                online.append((tokens, context))
                slack = min(slack, tracked.deadline - started)
            admitted = request.request_id in just_admitted
            if admitted:
                tracked.adopted = self.full_blocks(context)
                again += max(tracked.held - context, 0) if tracked.offline else 0
                tracked.held = 0
            if epoch:
                scheduled.append(self.recorded(request, tokens, tracked.adopted, admitted))
        model = self.latency.model
        online_work, offline_work = BatchWork.of(online), BatchWork.of(offline)
        work = replace(online_work + offline_work, armed=int(epoch > 0))
        batch = RunningBatch(
            work,
            online_work,
            len(offline),
            work.requests - len(offline),
            model.seconds(work),
            0.0,
            slack if online else None,
        )
        share = PromptSharing(tightest).share(model.seconds(BatchWork.of(decoding))) if decoding else 1.0
        all_decode = not (prompt_tokens or offline_prompts) and work.new_tokens == work.requests
        if all_decode and not epoch:
            self.decoding = DecodingBatch(output.num_scheduled_tokens, online_work, offline_work, tightest)
        return PendingIteration(
            started,
            batch,
            epoch,
            tuple(scheduled),
            offline_work.new_tokens,
            again_tokens=again,
            prompt_tokens=prompt_tokens,
            prompt_share=share,
            decodes=all_decode,
        )

    def ended(self, iteration: PendingIteration, requests: list[Any] | None) -> None:
        """Update the latency model, the policy and the reports from a finished iteration."""
        now = self.clock()
        # With asynchronous scheduling it was scheduled while the previous iteration ran.
        seconds = now - max(iteration.started, self._ended)
        self._ended = now
        late = 0
        if not iteration.aborted:
            late = self.tracked.served(requests, now, iteration.decodes)
            self.latency.observe(iteration.batch.work, seconds)
        self.policy.observe(iteration.done(now, seconds, late))
        if self._report is not None:
            self._report.speed.share = iteration.prompt_share
            if iteration.prompt_tokens and not iteration.aborted:
                self._report.speed.rate.observe(iteration.prompt_tokens, seconds)
                self._report.speed.long_prompts += iteration.prompt_tokens >= PROMPT_TOKENS
                self._report.counts["prompt_tokens"] += iteration.prompt_tokens
                self._report.counts["prompt_seconds"] += seconds
        # Report after every prompt, because a prefiller may have no other iteration for a long time.
        due = iteration.prompt_tokens or now >= self._curve_at + CURVE_S
        if due and self._reported is not self.latency.fitted:
            self.report_curve(now)
        self.count(iteration, seconds, late)
        if self._log.kept:
            self._log.write(self.entry(iteration, now, seconds, late))

    def report_curve(self, now: float) -> None:
        """Report the prefill curve of this engine, by which turns are placed."""
        if self._report is None:
            return
        self._curve_at, self._reported = now, self.latency.fitted
        model = self._reported
        chunk = PromptSharing.chunk(model, self.max_num_scheduled_tokens)
        self._report.speed.curve = astuple(curve_of(model, chunk))

    def drop_finished(self) -> None:
        for request_id in self.finished_req_ids:
            self.tracked.drop(request_id)

    def count(self, iteration: PendingIteration, seconds: float, late: int) -> None:
        """Hook that counts an iteration in the metrics."""

    def entry(self, iteration: PendingIteration, now: float, seconds: float, late: int) -> IterationRecord:
        return IterationRecord.of(iteration, now, seconds, late)
