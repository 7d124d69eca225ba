"""Interface of an in-engine policy: its inputs, its decisions, and its settings in the fleet file.

All are plain data, so that a simulated engine can use a policy as the real scheduler does.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from placement.scheduling.latency_model import BatchWork, LatencyModel


@dataclass(frozen=True, slots=True)
class TurnTargets:
    """SLO targets of an online request."""

    ttft_s: float = 2.0
    tbt_s: float = 0.2


DEFAULT_TARGETS = TurnTargets()


@dataclass(frozen=True, slots=True)
class RequestView:
    """Request as a policy sees it before an iteration."""

    key: str
    offline: bool
    arrival: float  # on the clock of the view
    tokens: int  # prompt and generated tokens so far
    computed: int  # tokens whose KV is on the accelerator
    blocks: int = 0  # blocks of KV it holds
    saved_blocks: int = 0  # blocks that are on the host as well, so that a preemption does not lose them
    restore_blocks: int = 0  # blocks to restore from the host before it can run
    running: bool = False
    last_token: float | None = None  # when its latest output token was made; None before the first
    last_served: float = 0.0  # when it last had tokens in an iteration
    slo: TurnTargets = DEFAULT_TARGETS
    refused: bool = False  # whether the engine lacked memory when it last tried to start the request
    queue_weight: float = 0.0  # seconds of waiting that its class and priority are worth (priorities.py)

    @property
    def pending(self) -> int:
        """Return the tokens to compute before the next output token."""
        left = self.tokens - self.computed
        return left if left > 1 else 1

    @property
    def decoding(self) -> bool:
        """Return whether the whole prompt is computed or scheduled, and only the next token is missing."""
        if not self.running or self.tokens - self.computed > 1:
            return False
        return self.last_token is not None or self.computed >= self.tokens

    def deadline(self) -> float:
        """Return when the request's next token is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of an engine between iterations."""

    now: float
    running: tuple[RequestView, ...]
    online_waiting: tuple[RequestView, ...]  # by arrival, or in the order of the last plan
    offline_waiting: int
    offline_head: RequestView | None  # the oldest waiting offline request, if any
    free_blocks: int
    total_blocks: int
    block_tokens: int
    max_tokens: int  # per iteration
    max_running: int


@dataclass(frozen=True, slots=True)
class DecodingView:
    """State of an engine where nothing waits and every running request decodes its next token."""

    online: BatchWork
    offline: BatchWork
    due_in_s: float  # until the first online token is due
    tbt_s: float  # tightest target of the online requests
    most_blocks: int  # most blocks that the next iteration can take
    free_blocks: int
    total_blocks: int


@dataclass(slots=True)
class BatchBuilder:
    """Builder of a batch: the engine offers it candidates, and it says how many tokens each gets."""

    model: LatencyModel
    work: BatchWork  # planned online work; offline work is added as it is taken
    tokens_left: int  # tokens of the iteration that are not planned for online requests
    target_s: float | None  # how long offline work may make the iteration; None: no limit
    online_left: int | None = None  # tokens that online requests may still take; None: no limit
    slots_left: int | None = None  # offline requests that may still join; None: no limit
    floor: Callable[[RequestView], int] = lambda request: 0  # least tokens of an offline request
    admit_waiting: bool = True  # whether waiting offline requests may start
    caps: Mapping[str, int] = field(default_factory=dict)  # request -> most tokens; others have no cap
    planned: frozenset[str] | None = None  # waiting online requests that `work` includes; None: not checked
    unplanned_s: float = math.inf  # how long an online request that is not planned may make the iteration
    offline_tokens: int = 0

    def offline_budget(self) -> int:
        """Return how many more offline tokens fit, if all are of one request without context."""
        if self.target_s is None:
            return self.tokens_left
        return self.model.max_tokens(self.work, 0, self.tokens_left, self.target_s)

    def take(self, request: RequestView, want: int) -> int:
        """Add up to `want` tokens of a request to the batch, and return how many were added."""
        if not request.offline:
            return self._take_online(request, want)
        want = min(want, self.tokens_left, self.caps.get(request.key, want))
        if want <= 0 or self.slots_left == 0 or not (request.running or self.admit_waiting):
            return 0
        tokens = want
        if self.target_s is not None:
            tokens = self.model.max_tokens(self.work, request.computed, want, self.target_s)
            tokens = max(tokens, min(want, self.floor(request)))
        if tokens == 0:
            return 0
        self.work = self.work.plus(tokens, request.computed)
        self.tokens_left -= tokens
        self.offline_tokens += tokens
        if self.slots_left is not None:
            self.slots_left -= 1
        return tokens

    def _take_online(self, request: RequestView, want: int) -> int:
        want = min(want, self.caps.get(request.key, want))
        if self.planned is not None and not request.running and request.key not in self.planned:
            # The request became ready after the plan was made, and must not wait for the next iteration.
            want = max(1, self.model.max_tokens(self.work, request.computed, want, self.unplanned_s))
            self.work = self.work.plus(want, request.computed)
        if self.online_left is None:
            return want
        tokens = min(want, self.online_left)
        self.online_left -= tokens
        return tokens


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """Decision of a policy before an iteration."""

    order: tuple[str, ...]  # order of the running requests
    preempt: tuple[str, ...]  # running offline requests that give back their memory and slot now
    builder: BatchBuilder = field(compare=False)
    # Waiting online requests, in the order in which the engine should try to start them; None: by arrival.
    waiting: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """Iteration that is running when a request arrives."""

    work: BatchWork
    online_work: BatchWork
    offline_requests: int
    online_requests: int
    seconds: float  # predicted time of the whole iteration
    passed_s: float  # time since it began
    slack_s: float | None  # from its start until the first online token is due; None: no online request


@dataclass(frozen=True, slots=True)
class IterationDone:
    """Finished iteration with its predicted and its measured time."""

    now: float
    predicted_s: float
    seconds: float
    late_requests: int  # online requests whose token came after its deadline
    aborted: bool


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings of a policy that the fleet file can change."""

    policy: str = "conserve"
    slo: TurnTargets = DEFAULT_TARGETS  # targets of requests that have none of their own
    margin: float = 0.1  # share of a target kept free for prediction errors (for `conserve`, its first value)
    safepoints: bool = True  # whether arrivals may abort an iteration
    offline_share: float = 0.0  # least share of an iteration's tokens for offline work
    ageing_s: float | None = None  # an offline request not served for this long gets a token an iteration


class ServingPolicy(ABC):
    """Policy that decides what an engine computes in its next iteration.

    Its caller calls `plan` before the iteration, `builder.take` for every candidate in order, and `observe`
    after the iteration. The engine's scheduler leaves `plan` out where `needs_no_plan` allows it.
    """

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings

    @abstractmethod
    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan: ...

    def needs_no_plan(self, view: DecodingView, model: LatencyModel) -> bool:
        """Return whether a plan would give each request exactly one token, and not arm the iteration."""
        return False

    def start_order(self, request: RequestView) -> tuple[float, ...]:
        """Return the sort key of a waiting offline request; the smallest starts first."""
        return (request.arrival,)

    def interrupts(
        self, arrival: RequestView, queued: BatchWork, batch: RunningBatch, model: LatencyModel
    ) -> bool:
        """Return whether to abort the running iteration, `batch`, for an arrival.

        `queued` is the work of the online requests that wait, this arrival included. The call comes on
        another thread while the iteration runs, so it must not change the policy's state.
        """
        return False

    def worth_arming(self, seconds: float, online_s: float) -> bool:
        """Return whether an iteration with offline requests should be armed, that is, can be aborted.

        An armed iteration is slower: it runs as piecewise CUDA graphs, and its host waits for the device.
        `seconds` is its predicted time. `online_s` is the predicted time of its online requests alone, which
        would be computed again after an abort.
        """
        return False

    def observe(self, done: IterationDone) -> None:  # noqa: B027  a policy may learn nothing
        """Let the policy learn from an iteration that ended."""
