"""Requests of vLLM as a policy sees them."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Any

from placement.scheduling.interface import RequestView, ServingPolicy, TurnTargets

logger = logging.getLogger("conserve.workers.coserving")

TTFT_ARGUMENT = "slo_ttft_ms"
TBT_ARGUMENT = "slo_tbt_ms"
# Set by the gateway (router/gateway/slo_classes.py).
QUEUE_WEIGHT_ARGUMENT = "queue_weight"
START_WINDOW = 64  # oldest waiting requests that a policy may reorder, which are looked up at each iteration


@dataclass(slots=True)
class TrackedRequest:
    """Request of vLLM, with the data that our scheduler keeps in addition."""

    request: Any
    offline: bool
    arrival: float  # on the scheduler's clock
    slo: TurnTargets
    queue_weight: float = 0.0
    last_token: float | None = None  # when its latest output token was made
    last_served: float = 0.0  # when it last had tokens in an iteration
    outputs: int = 0  # output tokens so far
    held: int = 0  # tokens that were computed at its last preemption
    refused: bool = False  # whether the engine lacked memory or a slot when it was last to start
    looked_up: float = -math.inf  # when `available` was determined
    available: int = 0  # tokens of its prompt that need no computation
    adopted: tuple[int, ...] = ()  # number of prefix-hit blocks at its last admission, by KV cache group

    @property
    def deadline(self) -> float:
        """Return when the next token of this request is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


def slo_of(arguments: Mapping[str, Any], default: TurnTargets) -> TurnTargets:
    """Return the SLO targets that a request has in `vllm_xargs`, or `default` for those that it lacks."""
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
    """Return the queue weight that the gateway set in a request's `vllm_xargs`, or 0."""
    try:
        seconds = float(arguments.get(QUEUE_WEIGHT_ARGUMENT, 0.0))
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


@dataclass(slots=True)
class TrackedRequests:
    """Table of an engine's online and offline requests, in order of arrival."""

    default_slo: TurnTargets
    arguments_of: Callable[[Any], Mapping[str, Any]]  # returns the `vllm_xargs` of a request
    blocks_of: Callable[[Any], int]  # returns how many blocks a request holds
    saved_blocks_of: Callable[[Any], int]  # returns how many of them are on the host as well
    restore_blocks_of: Callable[[Any], int]  # returns how many blocks to load from the host before it can run
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    by_id: dict[str, TrackedRequest] = field(default_factory=dict)
    _online: dict[str, TrackedRequest] = field(default_factory=dict)
    _offline: dict[str, TrackedRequest] = field(default_factory=dict)
    # Requests of the last iteration, if every one decoded a token. While the same requests decode again, the
    # time of their tokens is kept only here, until `settle` writes it to each request.
    _together: tuple[TrackedRequest, ...] = ()
    _together_at: float = 0.0
    _together_tbt_s: float = inf  # tightest target of the online requests
    _unsettled: int = 0  # iterations since the last `settle`

    def add(self, request: Any) -> TrackedRequest:
        # vLLM's arrival time is on the wall clock, so the request's age is converted to this clock.
        age = max(self.wall() - request.arrival_time, 0.0)
        offline = request.priority > 0
        arguments = self.arguments_of(request)
        # Targets of offline requests are ignored, so that a batch job cannot make turns wait.
        slo = self.default_slo if offline else slo_of(arguments, self.default_slo)
        weight = queue_weight_of(arguments)
        tracked = TrackedRequest(request, offline, self.clock() - age, slo, weight)
        self.by_id[request.request_id] = tracked
        (self._offline if offline else self._online)[request.request_id] = tracked
        return tracked

    def drop(self, request_id: str) -> None:
        """Forget a request that ended. Refused requests may fit now, so they lose the mark `refused`."""
        if self.by_id.pop(request_id, None) is not None:
            for tracked in self._online.values():
                tracked.refused = False
        self._online.pop(request_id, None)
        self._offline.pop(request_id, None)

    def online(self) -> Iterator[TrackedRequest]:
        return iter(self._online.values())

    def offline_waiting(self, at_most: int, is_waiting: Callable[[Any], bool]) -> Iterator[TrackedRequest]:
        """Yield waiting offline requests, oldest first.

        Only the `at_most` + 1 oldest offline requests are examined, because no more than `at_most` can run.
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
        """Return the oldest waiting offline requests in the order in which the policy starts them.

        The list is empty if the policy has no order of its own, which saves look-ups.
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
        """Return whether every request of the last iteration decoded one token."""
        return bool(self._together)

    def until_due(self, now: float) -> float:
        """Return the seconds until an online request of the last decoding batch is due for its next token."""
        return self._together_at + self._together_tbt_s - now

    def served(self, requests: Sequence[Any] | None, now: float, decodes: bool = False) -> int:
        """Record the tokens of an iteration that ended, and return how many online tokens were late.

        `requests` is None if the iteration repeated the previous one, whose requests were served together.
        `decodes` says whether every request decoded one token.
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
        """Record a token for each request of a repeated iteration; return how many online tokens are late."""
        passed, self._together_at = now - self._together_at, now
        self._unsettled += 1
        if passed <= self._together_tbt_s:
            return 0
        online = (one for one in self._together if not one.offline and one.request.request_id in self.by_id)
        return sum(passed > one.slo.tbt_s for one in online)

    def settle(self) -> None:
        """Write the time and number of the tokens of repeated iterations to each request."""
        if self._unsettled:
            for tracked in self._together:
                tracked.last_token = tracked.last_served = self._together_at
                tracked.outputs += self._unsettled
            self._unsettled = 0
