"""vLLM's requests as a policy sees them, and the check of arrivals during an iteration."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from placement.scheduling.interface import RequestView, ServingPolicy, TurnTargets
from placement.scheduling.latency_model import LatencyModel
from workers.engine.coserving.iterations import PendingIteration
from workers.engine.coserving.safepoint import Flag

logger = logging.getLogger("conserve.workers.coserving")

TTFT_ARGUMENT = "slo_ttft_ms"
TBT_ARGUMENT = "slo_tbt_ms"
# Set by the gateway (router/gateway/slo_classes.py).
QUEUE_WEIGHT_ARGUMENT = "queue_weight"
START_WINDOW = 64  # oldest waiting requests that a policy may reorder, looked up at each step


@dataclass(slots=True)
class TrackedRequest:
    """Request with the data that this scheduler keeps in addition to vLLM's record."""

    request: Any
    offline: bool
    arrival: float  # on the scheduler's clock
    slo: TurnTargets
    queue_weight: float = 0.0
    last_token: float | None = None
    last_served: float = 0.0
    outputs: int = 0
    held: int = 0  # tokens computed at its last preemption
    refused: bool = False  # the engine had no memory or slot when it was last to start
    looked_up: float = -math.inf  # when `available` was determined
    available: int = 0  # tokens of its prompt that need no computation
    adopted: tuple[int, ...] = ()  # blocks taken as prefix hits at its last admission, by KV cache group

    @property
    def deadline(self) -> float:
        """Return when the next token is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


def slo_of(arguments: Mapping[str, Any], default: TurnTargets) -> TurnTargets:
    """Return a request's SLO targets (`vllm_xargs`: slo_ttft_ms, slo_tbt_ms), or the engine's."""
    try:
        ttft = float(arguments[TTFT_ARGUMENT]) / 1000 if TTFT_ARGUMENT in arguments else default.ttft_s
        tbt = float(arguments[TBT_ARGUMENT]) / 1000 if TBT_ARGUMENT in arguments else default.tbt_s
    except (TypeError, ValueError, OverflowError):
        logger.warning("the SLO target of a request is not a number of milliseconds; the engine's is used")
        return default
    if not (0 < ttft < inf and 0 < tbt < inf):
        logger.warning("the SLO target of a request is not above zero and finite; the engine's is used")
        return default
    return TurnTargets(ttft, tbt)


def queue_weight_of(arguments: Mapping[str, Any]) -> float:
    """Return the queue weight that the gateway set, or 0."""
    try:
        seconds = float(arguments.get(QUEUE_WEIGHT_ARGUMENT, 0.0))
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


@dataclass(slots=True)
class TrackedRequests:
    """Requests of an engine by class, in order of arrival."""

    default_slo: TurnTargets
    arguments_of: Callable[[Any], Mapping[str, Any]]
    blocks_of: Callable[[Any], int]
    saved_blocks_of: Callable[[Any], int]  # returns how many blocks of a request are on the host as well
    restore_blocks_of: Callable[[Any], int]  # to load from the host before it can run
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    by_id: dict[str, TrackedRequest] = field(default_factory=dict)
    _online: dict[str, TrackedRequest] = field(default_factory=dict)
    _offline: dict[str, TrackedRequest] = field(default_factory=dict)
    # Requests of the last step if each of them got a token. Their times are kept here while the same requests
    # decode again, and written to each by `settle`.
    _together: tuple[TrackedRequest, ...] = ()
    _together_at: float = 0.0
    _together_tbt_s: float = inf  # tightest target
    _unsettled: int = 0  # steps

    def add(self, request: Any) -> TrackedRequest:
        # vLLM's arrival time is on the front end's wall clock; only the age is comparable here.
        age = max(self.wall() - request.arrival_time, 0.0)
        offline = request.priority > 0
        arguments = self.arguments_of(request)
        # A target in a line of a batch job must not make turns wait.
        slo = self.default_slo if offline else slo_of(arguments, self.default_slo)
        weight = queue_weight_of(arguments)
        tracked = TrackedRequest(request, offline, self.clock() - age, slo, weight)
        self.by_id[request.request_id] = tracked
        (self._offline if offline else self._online)[request.request_id] = tracked
        return tracked

    def drop(self, request_id: str) -> None:
        """Forget a request that ended; refused requests may start again."""
        if self.by_id.pop(request_id, None) is not None:
            for tracked in self._online.values():
                tracked.refused = False
        self._online.pop(request_id, None)
        self._offline.pop(request_id, None)

    def online(self) -> Iterator[TrackedRequest]:
        return iter(self._online.values())

    def offline_waiting(self, at_most: int, is_waiting: Callable[[Any], bool]) -> Iterator[TrackedRequest]:
        """Yield waiting offline requests, oldest first.

        Only the `at_most` + 1 oldest are examined: so many cannot all be running.
        """
        first = islice(self._offline.values(), at_most + 1)
        return (tracked for tracked in first if is_waiting(tracked.request))

    @property
    def offline_count(self) -> int:
        return len(self._offline)

    def view(self, tracked: TrackedRequest, running: bool, computed: int | None = None) -> RequestView:
        request = tracked.request
        return RequestView(
            key=request.request_id,
            offline=tracked.offline,
            arrival=tracked.arrival,
            tokens=request.num_tokens,
            computed=request.num_computed_tokens if computed is None else computed,
            blocks=self.blocks_of(request),
            saved_blocks=self.saved_blocks_of(request) if tracked.offline else 0,
            running=running,
            last_token=tracked.last_token,
            last_served=tracked.last_served,
            slo=tracked.slo,
            refused=tracked.refused,
            queue_weight=tracked.queue_weight,
        )

    def start_order(
        self, policy: ServingPolicy, at_most: int, is_waiting: Callable[[Any], bool]
    ) -> list[Any]:
        """Return waiting offline requests in the order in which the policy starts them.

        The list is empty if the policy has no order of its own, because the order requires look-ups.
        """
        if type(policy).start_order is ServingPolicy.start_order:
            return []
        waiting = islice(self.offline_waiting(at_most + START_WINDOW, is_waiting), START_WINDOW)
        views = [
            (replace(self.view(one, False), restore_blocks=self.restore_blocks_of(one.request)), one.request)
            for one in waiting
        ]
        views.sort(key=lambda pair: policy.start_order(pair[0]))
        return [request for _, request in views]

    @property
    def served_together(self) -> bool:
        """Return whether each request of the last step got a token."""
        return bool(self._together)

    def until_due(self, now: float) -> float:
        """Return the seconds until the first online request of the last step owes its next token."""
        return self._together_at + self._together_tbt_s - now

    def served(self, requests: Sequence[Any] | None, now: float, decodes: bool = False) -> int:
        """Update the requests of an iteration; return how many online tokens were late.

        `requests` is None if the requests of the iteration before were served together and decoded again.
        `decodes`: every request decoded one token.
        """
        if requests is None:
            return self._served_again(now)
        self.settle()
        self._together = ()
        late = 0
        served = []
        for request in requests:
            tracked = self.by_id.get(request.request_id)
            if tracked is None:
                continue
            tracked.last_served = now
            if request.num_output_tokens <= tracked.outputs:
                continue
            tracked.outputs = request.num_output_tokens
            late += not tracked.offline and now > tracked.deadline
            tracked.last_token = now
            served.append(tracked)
        if decodes and len(served) == len(requests):
            self._together, self._together_at = tuple(served), now
            self._together_tbt_s = min((one.slo.tbt_s for one in served if not one.offline), default=inf)
        return late

    def _served_again(self, now: float) -> int:
        """Record another token for each request of the last step; return how many online tokens were late."""
        passed, self._together_at = now - self._together_at, now
        self._unsettled += 1
        if passed <= self._together_tbt_s:
            return 0
        online = (one for one in self._together if not one.offline and one.request.request_id in self.by_id)
        return sum(passed > one.slo.tbt_s for one in online)

    def settle(self) -> None:
        """Write the token times and counts of repeated decode steps, kept as sums, to each request."""
        if self._unsettled:
            for tracked in self._together:
                tracked.last_token = tracked.last_served = self._together_at
                tracked.outputs += self._unsettled
            self._unsettled = 0


class ArrivalWatch:
    """Asks the policy about requests that arrive during an armed iteration and raises the preemption flag."""

    def __init__(
        self,
        policy: Callable[[], ServingPolicy],
        flag: Flag,
        model: Callable[[], LatencyModel],
        view_of: Callable[[Any, float], RequestView],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._flag = flag
        self._model = model
        self._view_of = view_of
        self._clock = clock
        self.in_flight: PendingIteration | None = None  # armed; set by the scheduler
        self.counts: Counter[str] = Counter()

    def take_counts(self) -> Counter[str]:
        counts, self.counts = self.counts, Counter()
        return counts

    def on_arrival(self, request: Any) -> None:
        """Judge an arrival, in the receiving thread. Only the flag is written."""
        try:
            self._judge(request)
        except Exception:
            # The request must reach the scheduler even if it cannot be judged.
            self.counts["coserving_unjudged"] += 1
            logger.exception("arrival not judged request=%s", request.request_id)

    def _judge(self, request: Any) -> None:
        running = self.in_flight
        if running is None or request.priority > 0 or running.raised:
            return
        now = self._clock()
        view = self._view_of(request, now)
        running.arrivals.append(view)
        queued = running.queued
        for arrival in running.arrivals:
            queued = queued.plus(arrival.pending, arrival.computed)
        batch = replace(running.batch, passed_s=now - running.started)
        if self._policy().interrupts(view, queued, batch, self._model()):
            self._flag.raise_for(running.epoch)
            running.raised = True
            self.counts["coserving_signals"] += 1
