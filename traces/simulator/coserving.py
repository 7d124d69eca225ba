"""One co-serving engine, iteration by iteration: the product's in-engine policies on a computed clock.

The engine does what vLLM does around a policy: two loops over running and waiting requests, blocks taken
when tokens are scheduled, the latest offline request giving way when a running online one lacks a block.
What an iteration takes is the `truth`; what the policy believes may be another model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from placement.latency import BatchWork, LatencyModel
from placement.serving.policy import ServingPolicy
from placement.serving.state import DEFAULT_SLO, EngineView, IterationDone, Row, RunningBatch, Slo


@dataclass(frozen=True, slots=True)
class EngineShape:
    blocks: int
    block_tokens: int = 16
    max_tokens: int = 2048
    max_running: int = 256
    layers: int = 32
    checkpoint: bool = True  # a preempted offline request resumes from the host; else it computes again


@dataclass(slots=True, eq=False)
class Job:
    key: str
    arrival: float
    prompt: int
    output: int
    offline: bool = False
    slo: Slo = DEFAULT_SLO
    computed: int = 0
    blocks: int = 0
    furthest: int = 0  # most tokens ever computed: what is computed again does not count as work done
    tokens_at: list[float] = field(default_factory=list)
    last_served: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + len(self.tokens_at)

    @property
    def done(self) -> bool:
        return len(self.tokens_at) >= self.output

    def row(self, running: bool, checkpoint: bool) -> Row:
        return Row(
            self.key, self.offline, self.arrival, self.tokens, self.computed, self.blocks,
            saved_blocks=self.blocks if checkpoint and self.offline else 0, running=running,
            last_token=self.tokens_at[-1] if self.tokens_at else None,
            last_served=self.last_served, slo=self.slo,
        )  # fmt: skip


@dataclass
class Served:
    """What came of a run."""

    finished: list[Job] = field(default_factory=list)
    offline_tokens: int = 0  # computed for the first time
    seconds: float = 0.0
    iterations: int = 0
    aborts: int = 0
    preemptions: int = 0

    def online(self) -> list[Job]:
        return [job for job in self.finished if not job.offline]


class CoServingEngine:
    def __init__(
        self,
        policy: ServingPolicy,
        shape: EngineShape,
        truth: LatencyModel,
        believed: LatencyModel | None = None,
    ) -> None:
        self._policy = policy
        self._shape = shape
        self._truth = truth
        self._believed = believed or truth
        self._running: list[Job] = []
        self._waiting: list[Job] = []
        self._free = shape.blocks
        self.served = Served()

    def run(self, arrivals: Iterable[Job], until: float, offline: Callable[[float], Job | None]) -> Served:
        """Until the clock has passed `until`; `offline` gives one more offline request when one is wanted."""
        coming = sorted(arrivals, key=lambda job: job.arrival)
        now = 0.0
        while now < until:
            while coming and coming[0].arrival <= now:
                self._waiting.append(coming.pop(0))
            while not any(job.offline for job in self._waiting) and (more := offline(now)) is not None:
                self._waiting.append(more)
            batch, online_work, work = self._schedule(now)
            if not batch:
                if self._running or self._waiting:
                    now += 1e-3
                elif coming:
                    now = coming[0].arrival
                else:
                    break
                continue
            seconds = self._truth.seconds(work)
            aborted_at = self._interrupted(batch, work, online_work, now, seconds, coming)
            ended = now + seconds if aborted_at is None else aborted_at
            self.served.iterations += 1
            late = 0
            if aborted_at is None:
                late = sum(self._advance(job, tokens, ended) for job, tokens in batch)
            else:
                self.served.aborts += 1
            offline_rows = sum(job.offline for job, _ in batch)
            self._policy.observe(
                IterationDone(
                    ended, work, self._believed.seconds(work), ended - now, len(batch) - offline_rows,
                    offline_rows, late, aborted_at is not None,
                )
            )  # fmt: skip
            now = ended
        self.served.seconds = now
        return self.served

    def _schedule(self, now: float) -> tuple[list[tuple[Job, int]], BatchWork, BatchWork]:
        plan = self._policy.plan(self._view(now), self._believed)
        by_key = {job.key: job for job in self._running}
        for key in plan.preempt:
            self._preempt(by_key.pop(key))
        self._running = [by_key[key] for key in plan.order]
        left, batch = self._shape.max_tokens, []
        for job in list(self._running):
            if left <= 0 or job not in self._running:
                continue
            tokens = plan.filling.take(self._row(job, True), min(job.tokens - job.computed, left))
            if tokens and self._allocate(job, tokens, give_way=not job.offline):
                batch.append((job, tokens))
                left -= tokens
        batch = [(job, tokens) for job, tokens in batch if job in self._running]
        for job in sorted(self._waiting, key=lambda job: (job.offline, job.arrival)):
            if left <= 0 or len(self._running) >= self._shape.max_running:
                break
            resumed = job.computed if not self._shape.checkpoint else job.furthest
            job.computed = min(resumed, job.tokens - 1)
            tokens = plan.filling.take(self._row(job, False), min(job.tokens - job.computed, left))
            if not tokens or not self._allocate(job, job.tokens - job.computed, give_way=False):
                break
            self._waiting.remove(job)
            self._running.append(job)
            batch.append((job, tokens))
            left -= tokens
        online = BatchWork.of((tokens, job.computed) for job, tokens in batch if not job.offline)
        return batch, online, BatchWork.of((tokens, job.computed) for job, tokens in batch)

    def _view(self, now: float) -> EngineView:
        online = sorted((j for j in self._waiting if not j.offline), key=lambda job: job.arrival)
        offline = sorted((j for j in self._waiting if j.offline), key=lambda job: job.arrival)
        shape = self._shape
        return EngineView(
            now, tuple(self._row(job, True) for job in self._running),
            tuple(self._row(job, False) for job in online), len(offline),
            self._row(offline[0], False) if offline else None, self._free, shape.blocks,
            shape.block_tokens, shape.max_tokens, shape.max_running,
        )  # fmt: skip

    def _row(self, job: Job, running: bool) -> Row:
        return job.row(running, self._shape.checkpoint)

    def _allocate(self, job: Job, tokens: int, give_way: bool) -> bool:
        need = -(-(job.computed + tokens) // self._shape.block_tokens) - job.blocks
        while need > self._free and give_way:
            victims = [other for other in self._running if other.offline]
            if not victims:
                return False
            latest = max(victims, key=lambda other: other.arrival)
            self._running.remove(latest)
            self._preempt(latest)
        if need > self._free:
            return False
        if need > 0:
            self._free -= need
            job.blocks += need
        return True

    def _preempt(self, job: Job) -> None:
        self._free += job.blocks
        job.blocks = job.computed = 0
        self._waiting.append(job)
        self.served.preemptions += 1

    def _interrupted(
        self, batch: list[tuple[Job, int]], work: BatchWork, online_work: BatchWork, now: float,
        seconds: float, coming: list[Job],
    ) -> float | None:  # fmt: skip
        """When the iteration is left, if an arrival in its course is worth it."""
        offline_rows = sum(job.offline for job, _ in batch)
        queued = BatchWork()
        for job in self._waiting:
            if not job.offline:
                queued = queued.plus(job.tokens - job.computed, job.computed)
        for job, tokens in batch:
            after = job.computed + tokens
            if not job.offline and after < job.tokens:
                queued = queued.plus(job.tokens - after, after)
        due = (self._row(job, True).deadline() for job, _ in batch if not job.offline)
        slack = min((at - now for at in due), default=None)
        layer = seconds / self._shape.layers
        for job in coming:
            if job.arrival >= now + seconds:
                break
            queued = queued.plus(job.prompt, 0)
            passed = job.arrival - now
            running = RunningBatch(
                work, online_work, offline_rows, len(batch) - offline_rows, self._believed.seconds(work),
                passed, slack,
            )  # fmt: skip
            if self._policy.interrupts(self._row(job, False), queued, running, self._believed):
                left_at = now + math.ceil(passed / layer) * layer
                return left_at if left_at < now + seconds else None
        return None

    def _advance(self, job: Job, tokens: int, now: float) -> bool:
        """Whether an online token came after its deadline."""
        job.computed += tokens
        job.last_served = now
        if job.offline:
            self.served.offline_tokens += max(job.computed - job.furthest, 0)
        job.furthest = max(job.furthest, job.computed)
        if job.computed < job.tokens:
            return False
        late = not job.offline and now > self._row(job, True).deadline()
        job.tokens_at.append(now)
        if job.done:
            self._running.remove(job)
            self._free += job.blocks
            job.blocks = 0
            self.served.finished.append(job)
        return late
