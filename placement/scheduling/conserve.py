"""Policy of the co-serving paper: online requests first, offline work until the next token is due."""

import math
from collections.abc import Sequence

from placement.priorities import ClassOrder
from placement.scheduling import memory_preemption
from placement.scheduling.interface import (
    BatchBuilder,
    DecodingView,
    EngineView,
    IterationDone,
    IterationPlan,
    RequestView,
    RunningBatch,
    ServingPolicy,
    ServingSettings,
)
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_budget import (
    share_online,
    stretched_iteration_s,
    tightest_target,
    until_a_token_is_due,
)
from placement.scheduling.prompt_order import PromptSharing


class Conserve(ServingPolicy):
    # These constants were chosen by measurement (`coserving.settings` in docs/measurements/retired.md).
    # An iteration is aborted only for an arrival that would need more than this share of its TTFT target. The
    # paper uses 1. A smaller share is better, because a waiting prompt delays the prompts that arrive behind
    # it.
    ttft_share = 0.35
    # For an arrival that would meet its TTFT target anyway: the seconds that an abort must save it for each
    # second of the iteration that is thrown away.
    abort_worth = 0.5
    abort_gain_s = 0.005  # an iteration with less than this left is not worth aborting
    armed_gains = 3  # an iteration shorter than this many times `abort_gain_s` is not armed
    # Decoding may cost this many times an iteration's constant before offline work gets less than all of the
    # time that the TBT targets leave. With infinity it always gets all.
    decoding_per_constant = 2.0
    online_reserve = 0.02  # share of all blocks kept free of newly started offline requests

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._arrivals = ArrivalRate()
        self._classes = ClassOrder()
        self._margin = Margin(settings.margin, beyond=0.05)
        # Prompts get a smaller margin: a shorter chunk would delay the prompts behind it, and an iteration
        # with a prompt may exceed a target without offline work too.
        self._prompt_margin = Margin(settings.margin, beyond=0.2)

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        online = memory_preemption.online_requests(view)
        self._arrivals.observe(view.now, view.online_waiting)
        preempted = memory_preemption.victims(
            view, lambda r: (self._starving(r, view.now), *cost_of_losing(r))
        )
        staying = memory_preemption.without(view.running, preempted)
        starving = sum(request.offline and self._starving(request, view.now) for request in staying)
        head_starves = view.offline_head is not None and self._starving(view.offline_head, view.now)
        offline_least = int(self._settings.offline_share * view.max_tokens)
        share = max(offline_least, starving + head_starves)
        online_left = view.max_tokens - share
        due_in_s = until_a_token_is_due(online, view.now, self._prompt_margin.share)
        sharing = PromptSharing(due_in_s, fills=True)
        first = share_online(online, view.now, online_left, model, sharing, self._classes)
        tokens_left = view.max_tokens - first.work.new_tokens
        target_s = tightest_target(
            online, view.now, model, self._margin.share, self.ttft_share, self.decoding_per_constant
        )
        if target_s is None:
            rate = self._arrivals.rate if self._settings.safepoints else 0.0
            tokens_left = min(tokens_left, best_batch(model, rate, view.max_tokens))
        waiting = tuple(request.key for request in first.prompts if not request.running)
        reserve = int(self.online_reserve * view.total_blocks) if online or self._arrivals.rate else 0
        freed = sum(request.blocks for request in preempted)
        free_after = view.free_blocks + freed - memory_preemption.online_demand(view)
        builder = BatchBuilder(
            model,
            first.work,
            tokens_left,
            target_s,
            caps=first.caps,
            online_left=online_left if share else None,
            admit_waiting=not preempted and (free_after > reserve or head_starves),
            planned=frozenset(waiting),
            unplanned_s=first.seconds,
        )
        builder.floor = lambda request: max(
            offline_least - builder.offline_tokens, int(self._starving(request, view.now))
        )
        order = online_then_offline(staying, first.prompts)
        return IterationPlan(order, tuple(request.key for request in preempted), builder, waiting)

    def needs_no_plan(self, view: DecodingView, model: LatencyModel) -> bool:
        if view.free_blocks <= max(int(self.online_reserve * view.total_blocks), view.most_blocks):
            return False
        if not view.offline.requests:
            return True
        if not view.online.requests:
            return False  # the number of offline tokens depends on the rate of arrivals
        seconds = model.seconds(view.online + view.offline)
        due_s = view.due_in_s - self._margin.share * view.tbt_s
        stretched_s = stretched_iteration_s(view.online, view.tbt_s, model, self.decoding_per_constant)
        armed = self.worth_arming(seconds, model.seconds(view.online))
        return not armed and seconds <= min(due_s, stretched_s)

    def interrupts(
        self, arrival: RequestView, queued: BatchWork, batch: RunningBatch, model: LatencyModel
    ) -> bool:
        """Return whether an arrival aborts the batch, by the paper's Algorithm 1 with a lower threshold.

        There is no abort if it would save little time, or make online requests of the batch late.
        """
        if not self._settings.safepoints or not batch.offline_requests:
            return False
        if batch.seconds < self.armed_gains * self.abort_gain_s:
            return False
        remaining_s = batch.seconds - batch.passed_s
        if remaining_s < self.abort_gain_s:
            return False
        waits_s = remaining_s + model.seconds(batch.online_work + queued)
        if waits_s <= arrival.slo.ttft_s * self.ttft_share:
            return False
        if waits_s <= arrival.slo.ttft_s and remaining_s < self.abort_worth * batch.passed_s:
            return False
        if batch.slack_s is None:
            return True
        # The online requests of the aborted iteration are computed again. With that time included,
        # the abort must still save time, and the tokens of these requests must still be in time.
        again_s = model.seconds(batch.online_work)
        return remaining_s - again_s >= self.abort_gain_s and batch.passed_s + again_s <= batch.slack_s

    def worth_arming(self, seconds: float, online_s: float) -> bool:
        long_enough = seconds >= self.armed_gains * self.abort_gain_s
        return self._settings.safepoints and long_enough and seconds - online_s >= self.abort_gain_s

    def observe(self, done: IterationDone) -> None:
        self._arrivals.decay(done.now)
        if not done.aborted:
            for margin in (self._margin, self._prompt_margin):
                margin.observe(done.predicted_s, done.seconds)

    def _starving(self, request: RequestView, now: float) -> bool:
        ageing_s = self._settings.ageing_s
        return ageing_s is not None and now - max(request.last_served, request.arrival) > ageing_s


def cost_of_losing(request: RequestView) -> tuple[int, float]:
    """Return the sort key of preemption victims: fewest blocks without a host copy, then latest arrival."""
    return (max(request.blocks - request.saved_blocks, 0), -request.arrival)


def online_then_offline(
    requests: tuple[RequestView, ...], prompts: Sequence[RequestView] = ()
) -> tuple[str, ...]:
    """Return the keys of `requests`: online before offline, decoding before prompts.

    Prompts that are in `prompts` are in its order, all others in order of arrival.
    """
    place = {request.key: number for number, request in enumerate(prompts)}
    order = sorted(requests, key=lambda r: (r.offline, not r.decoding, place.get(r.key, 0), r.arrival, r.key))
    return tuple(request.key for request in order)


def best_batch(model: LatencyModel, arrivals_per_s: float, max_tokens: int) -> int:
    """Return the number of tokens of an offline iteration that gives the best throughput despite aborts.

    An iteration of T seconds completes with probability exp(-rate * T). A long iteration amortises the
    constant (mainly the reading of weights), but is lost more often. Attention to context is left out,
    because it costs the same in whatever chunks a prompt is computed.
    """
    best, best_rate = 1, 0.0
    tokens = 1
    while True:
        seconds = model.seconds(BatchWork(new_tokens=tokens, context=tokens))
        rate = tokens / max(seconds, 1e-9) * math.exp(-arrivals_per_s * seconds)
        if rate >= best_rate:
            best, best_rate = tokens, rate
        if tokens >= max_tokens:
            return best
        tokens = min(tokens * 2, max_tokens)


class Margin:
    """Learned share of a target to keep free, so that a share `beyond` of iterations misses the target."""

    step, most = 0.02, 0.5

    def __init__(self, start: float, beyond: float) -> None:
        self.share = start
        self._beyond = beyond

    def observe(self, predicted_s: float, seconds: float) -> None:
        over = seconds > predicted_s * (1 + self.share)
        self.share += self.step * ((1 - self._beyond) if over else -self._beyond)
        self.share = min(max(self.share, 0.0), self.most)


class ArrivalRate:
    """Observer of online arrivals: their rate per second, averaged over about the last half minute."""

    memory_s = 30.0

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._at = 0.0
        self.rate = 0.0

    def observe(self, now: float, waiting: tuple[RequestView, ...]) -> None:
        keys = {request.key for request in waiting}
        self.decay(now)
        self.rate += len(keys - self._seen) / self.memory_s
        self._seen = keys

    def decay(self, now: float) -> None:
        if self._at:
            self.rate *= math.exp(-max(now - self._at, 0.0) / self.memory_s)
            if self.rate < 1e-6:
                self.rate = 0.0
        self._at = now
