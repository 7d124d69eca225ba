"""The co-serving paper's policy: online first, offline fills the time until a token is due."""

import math
from collections.abc import Sequence

from placement.priorities import ClassOrder
from placement.scheduling import preemption
from placement.scheduling.interface import (
    BatchBuilder,
    EngineView,
    IterationDone,
    IterationPlan,
    RequestView,
    RunningBatch,
    ServingPolicy,
    ServingSettings,
)
from placement.scheduling.latency_model import BatchWork, LatencyModel
from placement.scheduling.prompt_budget import best_class, share_out, tightest_target, until_a_token_is_due
from placement.scheduling.prompt_order import PromptSharing


class Conserve(ServingPolicy):
    # What measurement chose: docs/measurements/coserving.md compares others.
    # Of its TTFT, what an arrival may use up before the running iteration is aborted for it. The paper has
    # all of it; but a prompt that waits makes those wait that arrive behind it.
    ttft_share = 0.35
    # Where it would meet its TTFT all the same: seconds that the abort gives the arrival for each second of
    # the iteration that it throws away, at least.
    abort_worth = 0.5
    abort_gain_s = 0.005  # an iteration with less than this left is not worth aborting
    armed_gains = 3  # an iteration shorter than this many times that gain is not armed
    # Decoding may cost this many times an iteration's constant before offline work has less of what the TBT
    # targets leave; infinity: it always has all of it.
    decoding_per_constant = 2.0
    online_reserve = 0.02  # share of all blocks kept free of newly started offline requests

    def __init__(self, settings: ServingSettings) -> None:
        super().__init__(settings)
        self._arrivals = ArrivalRate()
        self._classes = ClassOrder()
        self._margin = Margin(settings.margin, beyond=0.05)
        # A prompt's iteration that takes longer than a target does so without offline work too; and a prompt
        # that is cut shorter for it makes those wait that arrive behind it.
        self._prompt_margin = Margin(settings.margin, beyond=0.2)
        self._lesser = self._gave_way = False  # the iteration is of lesser classes; the last such was left

    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan:
        online = preemption.online_requests(view)
        self._arrivals.see(view.now, view.online_waiting)
        taken = preemption.victims(view, lambda r: (self._starving(r, view.now), *cost_of_losing(r)))
        staying = preemption.without(view.running, taken)
        starving = sum(request.offline and self._starving(request, view.now) for request in staying)
        head_starves = view.offline_head is not None and self._starving(view.offline_head, view.now)
        offline_least = int(self._settings.offline_share * view.max_tokens)
        share = max(offline_least, starving + head_starves)
        online_left = view.max_tokens - share
        _, decoding = best_class([request for request in online if request.decoding])
        due_in = until_a_token_is_due(decoding, view.now, self._prompt_margin.share)
        sharing = PromptSharing(due_in, fills=True, arriving_s=self._settings.slo.tbt_s)
        first = share_out(online, view.now, online_left, model, sharing, self._classes)
        tokens_left = view.max_tokens - first.work.new_tokens
        margin = self._margin.share
        target = tightest_target(
            online, view.now, model, margin, self.ttft_share, self.decoding_per_constant
        )  # fmt: skip
        if first.held_back:  # a lesser class's prompt: offline work has no more than it must
            target = 0.0
        elif target is None:
            rate = self._arrivals.rate if self._settings.safepoints else 0.0
            tokens_left = min(tokens_left, best_batch(model, rate, view.max_tokens))
        waiting = tuple(request.key for request in first.prompts if not request.running)
        reserve = int(self.online_reserve * view.total_blocks) if online or self._arrivals.rate else 0
        free_after = view.free_blocks + sum(r.blocks for r in taken) - preemption.online_demand(view)
        builder = BatchBuilder(
            model, first.work, tokens_left, target, caps=first.caps,
            online_left=online_left if share else None,
            admit_waiting=not taken and (free_after > reserve or head_starves),
            planned=frozenset(waiting), unplanned_s=first.seconds,
        )  # fmt: skip
        builder.floor = lambda request: max(
            offline_least - builder.offline_tokens, int(self._starving(request, view.now))
        )
        order = online_then_offline(staying, first.prompts)
        self._lesser = first.yields
        # Of two in a row one is computed to its end, however often a better class comes.
        yields = first.yields and self._settings.safepoints and not self._gave_way
        return IterationPlan(order, tuple(r.key for r in taken), builder, waiting, yields=yields)

    def interrupts(
        self, arrival: RequestView, queued: BatchWork, batch: RunningBatch, model: LatencyModel
    ) -> bool:
        """Algorithm 1, sooner than in the paper, unless little is gained or online requests would pay.
        Before prompts of a lesser class an arrival goes whatever its target leaves: that is what classes are.
        """
        batch = batch.beside(arrival.claims_s)
        if not self._settings.safepoints or not (batch.offline_requests or batch.prompts):
            return False
        if not batch.prompts and batch.seconds < self.armed_gains * self.abort_gain_s:
            return False
        remaining = batch.seconds - batch.passed_s
        if remaining < self.abort_gain_s:
            return False
        waits = remaining + model.seconds(batch.online_work + queued)
        if not batch.prompts and waits <= arrival.slo.ttft_s * self.ttft_share:
            return False
        if waits <= arrival.slo.ttft_s and remaining < self.abort_worth * batch.passed_s:
            return False
        if batch.slack_s is None:
            return True
        # Its online requests do their pass again; the arrival has what that leaves of the time to their
        # deadline.
        again = model.seconds(batch.online_work)
        return remaining - again >= self.abort_gain_s and batch.passed_s + again <= batch.slack_s

    def worth_arming(self, seconds: float, online_s: float) -> bool:
        long_enough = seconds >= self.armed_gains * self.abort_gain_s
        return self._settings.safepoints and long_enough and seconds - online_s >= self.abort_gain_s

    @property
    def best_of_late_s(self) -> float:
        return self._classes.best_s if self._settings.safepoints else -math.inf

    def observe(self, done: IterationDone) -> None:
        self._arrivals.settle(done.now)
        if self._lesser:
            self._lesser, self._gave_way = False, done.aborted
        if not done.aborted:
            for margin in (self._margin, self._prompt_margin):
                margin.see(done.predicted_s, done.seconds)

    def _starving(self, request: RequestView, now: float) -> bool:
        ageing = self._settings.ageing_s
        return ageing is not None and now - max(request.last_served, request.arrival) > ageing


def cost_of_losing(request: RequestView) -> tuple[int, float]:
    """What a preemption would throw away: blocks not on the host; the latest to arrive first among equals."""
    return (max(request.blocks - request.saved_blocks, 0), -request.arrival)


def online_then_offline(
    requests: tuple[RequestView, ...], prompts: Sequence[RequestView] = ()
) -> tuple[str, ...]:
    """Requests that decode before prompts, which are cut to what the others leave: in the order given."""
    turn = {request.key: number for number, request in enumerate(prompts)}
    order = sorted(requests, key=lambda r: (r.offline, not r.decoding, turn.get(r.key, 0), r.arrival, r.key))
    return tuple(request.key for request in order)


def best_batch(model: LatencyModel, arrivals_per_s: float, max_tokens: int) -> int:
    """Tokens of an offline iteration that finish most tokens a second, given that an arrival may abort it.

    An iteration of T seconds completes with probability exp(-rate * T): long ones amortise the constant and
    the reading of weights, but are lost more often. Attention is left out: a prompt attends to the same
    tokens in whatever chunks it is computed.
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
    """Share of a target kept free: what iterations take beyond their prediction, but for `beyond` of them."""

    step, most = 0.02, 0.5

    def __init__(self, start: float, beyond: float) -> None:
        self.share = start
        self._beyond = beyond

    def see(self, predicted_s: float, seconds: float) -> None:
        over = seconds > predicted_s * (1 + self.share)
        self.share += self.step * ((1 - self._beyond) if over else -self._beyond)
        self.share = min(max(self.share, 0.0), self.most)


class ArrivalRate:
    """Online arrivals a second, forgetting over about half a minute."""

    memory_s = 30.0

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._at = 0.0
        self.rate = 0.0

    def see(self, now: float, waiting: tuple[RequestView, ...]) -> None:
        new = {request.key for request in waiting}
        self.settle(now)
        self.rate += len(new - self._seen) / self.memory_s
        self._seen = new

    def settle(self, now: float) -> None:
        if self._at:
            self.rate *= math.exp(-max(now - self._at, 0.0) / self.memory_s)
            if self.rate < 1e-6:
                self.rate = 0.0
        self._at = now
