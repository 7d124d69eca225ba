"""The co-serving paper's policy: online first, offline fills the time until a token is due."""

import math
from dataclasses import replace

from placement.latency import BatchWork, LatencyModel
from placement.serving import memory
from placement.serving.observed import ArrivalRate, Margin
from placement.serving.online import share_out, tightest_target
from placement.serving.policy import ServingSettings
from placement.serving.state import EngineView, Filling, IterationDone, Plan, Row, RunningBatch


class Conserve:
    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self._arrivals = ArrivalRate()
        self._margin = Margin(settings.margin, beyond=0.05)
        # A prompt's iteration that takes longer than a promise does so without offline work too; and a prompt
        # that is cut shorter for it makes those wait that arrive behind it.
        self._prompt_margin = Margin(settings.margin, beyond=0.2)

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        settings = self._settings
        online = memory.online_rows(view)
        self._arrivals.see(view.now, view.online_waiting)
        taken = memory.victims(view, lambda row: (self._starving(row, view.now), *cost_of_losing(row)))
        staying = memory.without(view.running, taken)
        starving = [row for row in staying if row.offline and self._starving(row, view.now)]
        head_starves = view.offline_head is not None and self._starving(view.offline_head, view.now)
        share = max(int(settings.offline_share * view.max_tokens), len(starving) + head_starves)
        online_left = view.max_tokens - share
        for_prompts = replace(settings, margin=self._prompt_margin.share)
        work, caps = share_out(online, view.now, online_left, model, for_prompts)
        tokens_left = view.max_tokens - work.new_tokens
        target = tightest_target(online, view.now, model, replace(settings, margin=self._margin.share))
        if target is None:
            tokens_left = min(tokens_left, best_batch(model, self._loss_rate(), view.max_tokens))
        reserve = int(settings.online_reserve * view.total_blocks) if online or self._arrivals.rate else 0
        free_after = view.free_blocks + sum(row.blocks for row in taken) - memory.online_demand(view)
        filling = Filling(
            model, work, tokens_left, target, caps=caps,
            online_left=online_left if share else None,
            admit_waiting=not taken and (free_after > reserve or head_starves),
        )  # fmt: skip
        filling.floor = lambda row: max(
            int(settings.offline_share * view.max_tokens) - filling.offline_tokens,
            1 if self._starving(row, view.now) else 0,
        )
        return Plan(online_then_offline(staying), tuple(row.key for row in taken), filling)

    def interrupts(self, arrival: Row, queued: BatchWork, batch: RunningBatch, model: LatencyModel) -> bool:
        """Algorithm 1, sooner than in the paper, unless there is little to gain or online rows would pay."""
        if not self._settings.safepoints or batch.offline_rows == 0:
            return False
        remaining = batch.seconds - batch.passed_s
        if remaining < self._settings.abort_gain_s:
            return False
        waits = remaining + model.seconds(batch.online_work + queued)
        if waits <= arrival.slo.ttft_s * self._settings.ttft_share:
            return False
        if waits <= arrival.slo.ttft_s and remaining < self._settings.abort_worth * batch.passed_s:
            return False
        if batch.slack_s is None:
            return True
        # Its online rows do their pass again; the arrival has what that leaves of the time to their deadline.
        again = model.seconds(batch.online_work)
        gains = remaining - again >= self._settings.abort_gain_s
        return gains and batch.passed_s + again <= batch.slack_s

    def observe(self, done: IterationDone) -> None:
        self._arrivals.settle(done.now)
        if not done.aborted:
            for margin in (self._margin, self._prompt_margin):
                margin.see(done.predicted_s, done.seconds)

    def _starving(self, row: Row, now: float) -> bool:
        ageing = self._settings.ageing_s
        return ageing is not None and now - max(row.last_served, row.arrival) > ageing

    def _loss_rate(self) -> float:
        return self._arrivals.rate if self._settings.safepoints else 0.0


def cost_of_losing(row: Row) -> tuple[int, float]:
    """What a preemption would throw away: blocks not on the host; the latest to arrive first among equals."""
    return (max(row.blocks - row.saved_blocks, 0), -row.arrival)


def online_then_offline(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Rows that decode before prompts: those are cut to what the others leave."""
    order = sorted(rows, key=lambda row: (row.offline, not row.decoding, row.arrival, row.key))
    return tuple(row.key for row in order)


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
