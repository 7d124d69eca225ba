"""vLLM's scheduler with a policy in it: translates its state, lets the policy decide, carries it out.

Decisions are in placement/serving/. What an iteration did is undone in rollback.py. Nothing here decides.
"""

import time
from collections.abc import Iterable
from typing import Any

import scipy.optimize  # noqa: F401  what the first correction of the model needs; it must not wait for it then
from vllm.v1.core.sched.scheduler import Scheduler

from kvtransfer.config import ConnectorConfig
from placement.correcting import SelfCorrecting
from placement.latency import BatchWork
from placement.serving import make_policy
from placement.serving.state import EngineView, Filling, IterationDone, Row, RunningBatch
from workers.coserving import arrival, flag, rollback
from workers.coserving import vllm_contact as contact
from workers.coserving.config import CoServingConfig
from workers.coserving.iterations import IterationLog, IterationRecord
from workers.coserving.rows import Rows, slo_of
from workers.coserving.safepoint import NAME as SAFEPOINT
from workers.coserving.starting_model import key_of, starting_model
from workers.coserving.step import Step, count, observe


class CoServingScheduler(Scheduler):
    """For vLLM's `--scheduler-cls`; needs `--scheduling-policy priority`. Priority above 0 means offline."""

    rollback_steps = rollback.STEPS
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        contact.verify()
        super().__init__(*args, **kwargs)
        contact.refuse_unsupported(self)
        config = CoServingConfig.from_additional_config(self.vllm_config.additional_config)
        self._policy = make_policy(config.serving)
        model = starting_model(config, key_of(self.vllm_config.model_config.model))
        self._latency = SelfCorrecting(model)
        self._rows = Rows(
            config.serving.slo,
            contact.extra_args,
            lambda request: contact.blocks_held(self, request),
            contact.saved_blocks_of(self),
        )
        self._books = contact.Books(self)
        self._log = IterationLog(config.iteration_log)
        self._filling: Filling | None = None
        self._budget = 0
        self._step: Step | None = None
        self._flag: flag.Flag | None = None
        self._watch: arrival.ArrivalWatch | None = None
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None:
            name = ConnectorConfig.from_extra_config(transfer.kv_connector_extra_config).safepoint
            if name:
                self._flag = flag.Flag(name)
                self._watch = arrival.ArrivalWatch(
                    self._policy, self._flag, lambda: self._latency.model, self._arriving_row
                )
                arrival.install(self._watch)

    def add_request(self, request: Any) -> None:
        known = request.request_id in self.requests
        super().add_request(request)
        if not known:
            self._rows.add(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        started = time.monotonic()
        preempted = self._carry_out_plan(started)
        running_before = {request.request_id for request in self.running}
        output = super().schedule(throttle_prefills)
        self._filling = None
        if output.total_num_scheduled_tokens:
            self._step = self._note_step(output, started, running_before, preempted)
            self._publish(self._step)
        return output

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks here for every candidate, running or waiting, after all its own caps."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        track = self._rows.tracks.get(request.request_id)
        if tokens <= 0 or self._filling is None or track is None:
            return int(tokens)
        row = self._rows.row(track, contact.is_running(request), num_computed_tokens)
        return self._filling.take(row, tokens)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        """Ours and vLLM's own preemptions both come through here."""
        track = self._rows.tracks.get(request.request_id)
        if track is not None:
            track.held = max(track.held, request.num_computed_tokens)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step = self._settle_abort()
        rows = list(contact.iterate_scheduled(self, scheduler_output))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if step is not None:
            self._account(step, [request for request, _ in rows])
        for request, _ in rows:
            if request.is_finished():
                self._rows.drop(request.request_id)
        self._step = None
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        # A client that hangs up ends its request before the iteration's result is taken. What an aborted
        # iteration registered for it must be disowned first: its blocks are about to be kept or freed.
        self._settle_abort()
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            self._rows.drop(request.request_id)
        return ended

    def shutdown(self) -> None:
        self._log.close()
        super().shutdown()

    def _carry_out_plan(self, now: float) -> int:
        self._filling, self._budget = None, 0
        if self.pause_state.value:  # paused: vLLM's own rules
            return 0
        view = self._view(now)
        plan = self._policy.plan(view, self._latency.model)
        by_key = {request.request_id: request for request in self.running}
        for key in plan.preempt:
            contact.preempt(self, by_key.pop(key), now)
        self.running = [by_key[key] for key in plan.order]
        self._filling, self._budget = plan.filling, plan.filling.room()
        contact.let_offline_start(self, plan.filling.admit_waiting)
        return len(plan.preempt)

    def _view(self, now: float) -> EngineView:
        rows = self._rows
        tracks = [(request, rows.tracks.get(request.request_id)) for request in self.running]
        running = tuple(rows.row(track or rows.add(request), True) for request, track in tracks)
        waiting = tuple(
            rows.row(track, False, self._computed_if_started(track.request))
            for track in rows.online()
            if contact.is_waiting(track.request)
        )
        head = rows.offline_head(self.max_num_active_reqs, contact.is_waiting)
        return EngineView(
            now=now,
            running=running,
            online_waiting=waiting,
            offline_waiting=rows.offline_count - sum(row.offline for row in running),
            offline_head=rows.row(head, False) if head is not None else None,
            free_blocks=contact.free_blocks(self),
            total_blocks=contact.total_blocks(self),
            block_tokens=contact.block_tokens(self),
            max_tokens=self.max_num_scheduled_tokens,
            max_running=self.max_num_active_reqs,
        )

    def _computed_if_started(self, request: Any) -> int:
        return int(request.num_computed_tokens) or contact.cached_tokens(self, request)

    def _arriving_row(self, request: Any, now: float) -> Row:
        """In the receiving thread."""
        return Row(
            request.request_id,
            offline=False,
            arrival=now,
            tokens=request.num_tokens,
            computed=contact.cached_tokens(self, request),
            slo=slo_of(contact.extra_args(request), self._rows.default_slo),
        )

    def _note_step(self, output: Any, started: float, running_before: set[str], preempted: int) -> Step:
        epoch = contact.armed_epoch(output, SAFEPOINT) if self._flag is not None else 0
        work, online_work, online_rows, offline_rows = BatchWork(), BatchWork(), 0, 0
        slack: float | None = None
        ledger: list[rollback.ScheduledRow] = []
        offline_tokens = again = 0
        for request, tokens in contact.iterate_scheduled(self, output):
            track = self._rows.tracks[request.request_id]
            context = request.num_computed_tokens - tokens
            work = work.plus(tokens, context)
            if request.priority > 0:
                offline_rows += 1
                offline_tokens += tokens
            else:
                online_rows += 1
                online_work = online_work.plus(tokens, context)
                left = track.deadline - started
                slack = left if slack is None else min(slack, left)
            admitted = request.request_id not in running_before
            if admitted:
                track.adopted = contact.full_blocks(self, context)
                again += max(track.held - context, 0) if track.offline else 0
                track.held = 0
            if epoch:
                ledger.append(contact.scheduled_row(self, request, tokens, track.adopted, admitted))
        seconds = self._latency.model.seconds(work)
        batch = RunningBatch(work, online_work, offline_rows, online_rows, seconds, 0.0, slack)
        return Step(started, batch, epoch, tuple(ledger), offline_tokens, preempted, self._budget, again)

    def _publish(self, step: Step) -> None:
        if self._watch is None:
            return
        queued = BatchWork()
        for track in self._rows.online():
            request = track.request
            left = request.num_tokens - request.num_computed_tokens  # of running rows: after this step
            if left > 0 and (contact.is_waiting(request) or contact.is_running(request)):
                queued = queued.plus(left, request.num_computed_tokens)
        self._watch.in_flight = (
            arrival.InFlight(step.epoch, step.started, step.batch, queued) if step.epoch else None
        )

    def _settle_abort(self) -> Step | None:
        """Undoes the current step if the workers left it early. Once, whoever asks first."""
        step = self._step
        if step is None or not step.epoch or step.aborted:
            return step
        if self._watch is not None:
            self._watch.in_flight = None
        if self._flag is not None and self._flag.aborted(step.epoch):
            step.disowned = rollback.roll_back(step.ledger, self._books, self.rollback_steps)
            step.aborted = True
        return step

    def _account(self, step: Step, requests: list[Any]) -> None:
        now = time.monotonic()
        seconds = now - step.started
        late = 0
        if not step.aborted:
            late = sum(self._rows.served(request, now) for request in requests)
            self._latency.observe(step.batch.work, seconds)
        batch = step.batch
        self._policy.observe(
            IterationDone(
                now, batch.work, batch.seconds, seconds, batch.online_rows, batch.offline_rows, late,
                step.aborted,
            )
        )  # fmt: skip
        self._count(step, seconds, late)
        self._log.write(self._record(step, now, seconds, late))

    def _count(self, step: Step, seconds: float, late: int) -> None:
        half = self.connector.scheduler_half(SAFEPOINT) if self._flag is not None else None
        if half is None or self._flag is None:
            return
        count(step, half.counts, seconds, late)
        observe(step, half.observations, seconds, self._flag.abort_wait_s())
        if self._watch is not None:
            half.counts.update(self._watch.take_counts())

    def _record(self, step: Step, now: float, seconds: float, late: int) -> IterationRecord:
        batch, work = step.batch, step.batch.work
        aborted: dict[str, Any] = {}
        if step.aborted and self._flag is not None:
            fields = self._flag.fields
            aborted = {
                "abort_layer": fields[flag.ABORTED_LAYER],
                "signal_to_abort_s": self._flag.abort_wait_s(),
                "check_gap_s": fields[flag.GAP_NS] / 1e9,
                "disowned_blocks": step.disowned,
            }
        return IterationRecord(
            at=now, seconds=seconds, predicted_s=batch.seconds, new_tokens=work.new_tokens,
            attended=work.attended, context=work.context, online_rows=batch.online_rows,
            offline_rows=batch.offline_rows, offline_tokens=step.offline_tokens, preempted=step.preempted,
            late_rows=late, aborted=step.aborted, again_tokens=step.again_tokens, before=work.before,
            **aborted,
        )  # fmt: skip
