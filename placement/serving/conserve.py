"""The co-serving paper's policy: online first, offline fills what the tightest TBT leaves."""

import math

from placement.latency import BatchWork, LatencyModel
from placement.serving import memory
from placement.serving.policy import ServingSettings
from placement.serving.state import EngineView, Filling, IterationDone, Plan, Row, RunningBatch


class Conserve:
    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings
        self._arrivals = ArrivalRate()
        self._redo = False  # the last iteration was aborted with online rows in it

    def plan(self, view: EngineView, model: LatencyModel) -> Plan:
        settings = self._settings
        online = memory.online_rows(view)
        decoding = [row for row in online if row.running and row.last_token is not None and row.pending == 1]
        if self._redo and 0 < len(decoding) < len(online):
            return self._catch_up(view, model, online, decoding)
        self._arrivals.see(view.now, view.online_waiting)
        taken = memory.victims(view, lambda row: (self._starving(row, view.now), *cost_of_losing(row)))
        staying = memory.without(view.running, taken)
        starving = [row for row in staying if row.offline and self._starving(row, view.now)]
        head_starves = view.offline_head is not None and self._starving(view.offline_head, view.now)
        share = max(int(settings.offline_share * view.max_tokens), len(starving) + head_starves)
        online_left = view.max_tokens - share
        work = memory.online_work(online, online_left)
        tokens_left = view.max_tokens - work.new_tokens
        target = tightest_target(online, view.now, settings)
        if target is None:
            tokens_left = min(tokens_left, best_batch(model, self._loss_rate(), view.max_tokens))
        reserve = int(settings.online_reserve * view.total_blocks) if online or self._arrivals.rate else 0
        free_after = view.free_blocks + sum(row.blocks for row in taken) - memory.online_demand(view)
        filling = Filling(
            model, work, tokens_left, target,
            online_left=online_left if share else None,
            admit_waiting=not taken and (free_after > reserve or head_starves),
        )  # fmt: skip
        filling.floor = lambda row: max(
            int(settings.offline_share * view.max_tokens) - filling.offline_tokens,
            1 if self._starving(row, view.now) else 0,
        )
        return Plan(online_then_offline(staying), tuple(row.key for row in taken), filling)

    def _catch_up(
        self, view: EngineView, model: LatencyModel, online: tuple[Row, ...], decoding: list[Row]
    ) -> Plan:
        """The rows that an abort set back get their token at once; the arrival it was for comes right after.

        Together they would wait for the arrival's prefill on top of the time that the abort has cost them.
        """
        work = memory.online_work(decoding, view.max_tokens)
        later = frozenset(row.key for row in online) - {row.key for row in decoding}
        filling = Filling(model, work, 0, None, skipped=later, admit_waiting=False)
        return Plan(online_then_offline(view.running), (), filling)

    def interrupts(self, arrival: Row, queued: BatchWork, batch: RunningBatch, model: LatencyModel) -> bool:
        """Algorithm 1, and two cases it leaves out: nothing to gain, and online rows that would pay."""
        if not self._settings.safepoints or batch.offline_rows == 0:
            return False
        remaining = batch.seconds - batch.passed_s
        if remaining < self._settings.abort_gain_s:
            return False
        own = model.seconds(batch.online_work + queued)
        if remaining + own <= arrival.slo.ttft_s * self._settings.ttft_share:
            return False
        if batch.tightest_tbt_s is None:
            return True
        # Its online rows do their pass again, alone, before the arrival gets its first tokens.
        again = model.seconds(batch.online_work)
        gains = remaining - again >= self._settings.abort_gain_s
        return gains and batch.passed_s + again <= batch.tightest_tbt_s

    def observe(self, done: IterationDone) -> None:
        self._redo = done.aborted and done.online_rows > 0
        self._arrivals.settle(done.now)

    def _starving(self, row: Row, now: float) -> bool:
        ageing = self._settings.ageing_s
        return ageing is not None and now - max(row.last_served, row.arrival) > ageing

    def _loss_rate(self) -> float:
        return self._arrivals.rate if self._settings.safepoints else 0.0


def tightest_target(online: tuple[Row, ...], now: float, settings: ServingSettings) -> float | None:
    """What an iteration may take: the least TBT, and of rows still in prefill what is left of their share.

    A prompt's last chunk is small, and would otherwise be filled up with offline work while others wait
    behind it.
    """
    targets = [row.slo.tbt_s for row in online]
    share = settings.ttft_share
    targets += [row.arrival + share * row.slo.ttft_s - now for row in online if row.last_token is None]
    return max(min(targets) * (1 - settings.margin), 0.0) if targets else None


class ArrivalRate:
    """Online arrivals a second, forgetting over about half a minute."""

    def __init__(self, memory_s: float = 30.0) -> None:
        self._memory_s = memory_s
        self._seen: set[str] = set()
        self._at = 0.0
        self.rate = 0.0

    def see(self, now: float, waiting: tuple[Row, ...]) -> None:
        new = {row.key for row in waiting}
        self.settle(now)
        self.rate += len(new - self._seen) / self._memory_s
        self._seen = new

    def settle(self, now: float) -> None:
        if self._at:
            self.rate *= math.exp(-max(now - self._at, 0.0) / self._memory_s)
            if self.rate < 1e-6:
                self.rate = 0.0
        self._at = now


def cost_of_losing(row: Row) -> tuple[int, float]:
    """What a preemption would throw away: blocks not on the host; the latest to arrive first among equals."""
    return (max(row.blocks - row.saved_blocks, 0), -row.arrival)


def online_then_offline(rows: tuple[Row, ...]) -> tuple[str, ...]:
    return tuple(row.key for row in sorted(rows, key=lambda row: (row.offline, row.arrival, row.key)))


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
