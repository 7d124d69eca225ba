"""Simulation of one co-serving engine, iteration by iteration, with the product's scheduling policies.

The engine does what vLLM does around a policy: it loops over running and then waiting requests, takes blocks
when tokens are scheduled, and preempts the latest offline request when a running online request lacks a
block. The latency model `truth` determines how long an iteration takes; the policy may have another model.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from placement.scheduling.interface import (
    DEFAULT_TARGETS,
    EngineView,
    IterationDone,
    RequestView,
    RunningBatch,
    ServingPolicy,
    TurnTargets,
)
from placement.scheduling.latency_model import BatchWork, LatencyModel


@dataclass(frozen=True, slots=True)
class SimulatedShape:
    blocks: int
    block_tokens: int = 16
    max_tokens: int = 2048
    max_running: int = 256
    layers: int = 32
    checkpoint: bool = True  # a preempted offline request resumes from the host; else it computes again


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    key: str
    arrival: float
    prompt: int
    output: int
    offline: bool = False
    slo: TurnTargets = DEFAULT_TARGETS
    queue_weight: float = 0.0  # seconds that its class is worth
    computed: int = 0
    blocks: int = 0
    furthest: int = 0  # most tokens ever computed; tokens computed again do not count as work done
    tokens_at: list[float] = field(default_factory=list)
    last_served: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + len(self.tokens_at)

    @property
    def done(self) -> bool:
        return len(self.tokens_at) >= self.output

    def view(self, running: bool, shape: SimulatedShape) -> RequestView:
        on_host = shape.checkpoint and self.offline
        return RequestView(
            self.key,
            self.offline,
            self.arrival,
            self.tokens,
            self.computed,
            self.blocks,
            saved_blocks=self.blocks if on_host else 0,
            restore_blocks=0 if running or not on_host else -(-self.furthest // shape.block_tokens),
            running=running,
            last_token=self.tokens_at[-1] if self.tokens_at else None,
            last_served=self.last_served,
            slo=self.slo,
            queue_weight=self.queue_weight,
        )


@dataclass
class Served:
    """Counts and times of one simulated run."""

    finished: list[SimulatedRequest] = field(default_factory=list)
    offline_tokens: int = 0  # computed for the first time
    seconds: float = 0.0
    iterations: int = 0
    aborts: int = 0
    preemptions: int = 0

    def online(self) -> list[SimulatedRequest]:
        return [request for request in self.finished if not request.offline]


class SimulatedCoServing:
    def __init__(
        self,
        policy: ServingPolicy,
        shape: SimulatedShape,
        truth: LatencyModel,
        believed: LatencyModel | None = None,
    ) -> None:
        self._policy = policy
        self._shape = shape
        self._truth = truth
        self._believed = believed or truth
        self._running: list[SimulatedRequest] = []
        self._waiting: list[SimulatedRequest] = []
        self.free_blocks = shape.blocks
        self.served = Served()

    def run(
        self,
        arrivals: Iterable[SimulatedRequest],
        until: float,
        offline: Callable[[float], SimulatedRequest | None] = lambda now: None,
        follows: Callable[[SimulatedRequest], SimulatedRequest | None] = lambda ended: None,
    ) -> Served:
        """Run until the clock has passed `until`.

        `offline` returns the next offline request when the engine can take one, and `follows` returns the
        turn that comes after a turn that has ended.
        """
        coming = sorted(arrivals, key=lambda request: request.arrival)
        now, ended_ones = 0.0, 0
        while now < until:
            for one in self.served.finished[ended_ones:]:
                if (later := follows(one)) is not None:
                    insort(coming, later, key=lambda request: request.arrival)
            ended_ones = len(self.served.finished)
            while coming and coming[0].arrival <= now:
                self._waiting.append(coming.pop(0))
            while (
                not any(request.offline for request in self._waiting) and (more := offline(now)) is not None
            ):
                self._waiting.append(more)
            batch = self._schedule(now)
            if not batch:
                if self._running or self._waiting:
                    now += 1e-3
                elif coming:
                    now = coming[0].arrival
                else:
                    break
                continue
            work = BatchWork.of((tokens, request.computed) for request, tokens in batch)
            seconds = self._truth.seconds(work)
            aborted_at = self._interrupted(batch, work, now, seconds, coming)
            ended = now + seconds if aborted_at is None else aborted_at
            self.served.iterations += 1
            late = 0
            if aborted_at is None:
                late = sum(self._advance(request, tokens, ended) for request, tokens in batch)
            else:
                self.served.aborts += 1
            predicted_s = self._believed.seconds(work)
            self._policy.observe(IterationDone(ended, predicted_s, ended - now, late, aborted_at is not None))
            now = ended
        self.served.seconds = now
        return self.served

    def _schedule(self, now: float) -> list[tuple[SimulatedRequest, int]]:
        plan = self._policy.plan(self._view(now), self._believed)
        by_key = {request.key: request for request in self._running}
        for key in plan.preempt:
            self._preempt(by_key.pop(key))
        self._running = [by_key[key] for key in plan.order]
        left, batch = self._shape.max_tokens, []
        for request in list(self._running):
            if left <= 0 or request not in self._running:
                continue
            tokens = plan.builder.take(
                self._view_of(request, True), min(request.tokens - request.computed, left)
            )
            if tokens and self._allocate(request, tokens, give_way=not request.offline):
                batch.append((request, tokens))
                left -= tokens
        batch = [(request, tokens) for request, tokens in batch if request in self._running]
        for request in self._in_order(plan.waiting):
            if left <= 0 or len(self._running) >= self._shape.max_running:
                break
            resumed = request.computed if not self._shape.checkpoint else request.furthest
            request.computed = min(resumed, request.tokens - 1)
            tokens = plan.builder.take(
                self._view_of(request, False), min(request.tokens - request.computed, left)
            )
            if not tokens or not self._allocate(request, request.tokens - request.computed, give_way=False):
                break
            self._waiting.remove(request)
            self._running.append(request)
            batch.append((request, tokens))
            left -= tokens
        return batch

    def _view(self, now: float) -> EngineView:
        waiting = self._in_order()
        online = [request for request in waiting if not request.offline]
        offline = waiting[len(online) :]
        shape = self._shape
        return EngineView(
            now,
            tuple(self._view_of(request, True) for request in self._running),
            tuple(self._view_of(request, False) for request in online),
            len(offline),
            self._view_of(offline[0], False) if offline else None,
            self.free_blocks,
            shape.blocks,
            shape.block_tokens,
            shape.max_tokens,
            shape.max_running,
        )

    def _in_order(self, first: tuple[str, ...] | None = None) -> list[SimulatedRequest]:
        """Return the waiting requests in the order in which they start.

        Online requests come first, in the plan's order; those that the plan does not name follow by arrival.
        Offline requests come last, in the policy's order.
        """
        turn = {key: number for number, key in enumerate(first or ())}
        online = sorted(
            (request for request in self._waiting if not request.offline),
            key=lambda request: (turn.get(request.key, len(turn)), request.arrival),
        )
        offline = (request for request in self._waiting if request.offline)
        return online + sorted(offline, key=lambda r: self._policy.start_order(self._view_of(r, False)))

    def _view_of(self, request: SimulatedRequest, running: bool) -> RequestView:
        return request.view(running, self._shape)

    def _allocate(self, request: SimulatedRequest, tokens: int, give_way: bool) -> bool:
        need = -(-(request.computed + tokens) // self._shape.block_tokens) - request.blocks
        while need > self.free_blocks and give_way:
            victims = [other for other in self._running if other.offline]
            if not victims:
                return False
            latest = max(victims, key=lambda other: other.arrival)
            self._running.remove(latest)
            self._preempt(latest)
        if need > self.free_blocks:
            return False
        if need > 0:
            self.free_blocks -= need
            request.blocks += need
        return True

    def _preempt(self, request: SimulatedRequest) -> None:
        self.free_blocks += request.blocks
        request.blocks = request.computed = 0
        self._waiting.append(request)
        self.served.preemptions += 1

    def _interrupted(
        self,
        batch: list[tuple[SimulatedRequest, int]],
        work: BatchWork,
        now: float,
        seconds: float,
        coming: list[SimulatedRequest],
    ) -> float | None:
        """Return when an arrival aborts the iteration, or None if no arrival does."""
        running = self._running_batch(batch, work, now)
        waiting = [(one.tokens - one.computed, one.computed) for one in self._waiting if not one.offline]
        for request, tokens in batch:
            after = request.computed + tokens
            if not request.offline and after < request.tokens:
                waiting.append((request.tokens - after, after))
        queued = BatchWork.of(waiting)
        layer = seconds / self._shape.layers
        for request in coming:
            if request.arrival >= now + seconds:
                break
            view = self._view_of(request, False)
            queued = queued.plus(request.prompt, 0)
            passed = request.arrival - now
            if self._policy.interrupts(view, queued, replace(running, passed_s=passed), self._believed):
                left_at = now + math.ceil(passed / layer) * layer
                return left_at if left_at < now + seconds else None
        return None

    def _running_batch(
        self, batch: list[tuple[SimulatedRequest, int]], work: BatchWork, now: float
    ) -> RunningBatch:
        """Return the batch as it is when the iteration begins."""
        online = [(request, tokens) for request, tokens in batch if not request.offline]
        due = [self._view_of(request, True).deadline() - now for request, _ in online]
        return RunningBatch(
            work,
            BatchWork.of((tokens, request.computed) for request, tokens in online),
            offline_requests=len(batch) - len(online),
            online_requests=len(online),
            seconds=self._believed.seconds(work),
            passed_s=0.0,
            slack_s=min(due, default=None),
        )

    def _advance(self, request: SimulatedRequest, tokens: int, now: float) -> bool:
        """Advance a request; return whether an online token came after its deadline."""
        request.computed += tokens
        request.last_served = now
        if request.offline:
            self.served.offline_tokens += max(request.computed - request.furthest, 0)
        request.furthest = max(request.furthest, request.computed)
        if request.computed < request.tokens:
            return False
        late = not request.offline and now > self._view_of(request, True).deadline()
        request.tokens_at.append(now)
        if request.done:
            self._running.remove(request)
            self.free_blocks += request.blocks
            request.blocks = 0
            self.served.finished.append(request)
        return late
