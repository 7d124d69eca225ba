"""Interface of a policy inside an engine: what it is told, what it answers, and what an operator may set.

Plain data, which the simulator builds as well as the engine's scheduler.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from placement.scheduling.latency_model import BatchWork, LatencyModel


@dataclass(frozen=True, slots=True)
class TurnTargets:
    """SLO targets of an online request."""

    ttft_s: float = 2.0
    tbt_s: float = 0.2


DEFAULT_TARGETS = TurnTargets()


def worth_of(queue_weight: float, priority_s: float) -> float:
    """What a class is worth beside others, without the priority that came with a request."""
    return round(queue_weight - priority_s, 6)


def place_of(queue_weight: float, priority_s: float) -> float:
    """What a request keeps its place in an iteration by: its class, or that with its priority."""
    return max(worth_of(queue_weight, priority_s), queue_weight)


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as a policy sees it, before an iteration."""

    key: str
    offline: bool
    arrival: float  # on the clock of the view
    tokens: int  # prompt and what was generated so far
    computed: int  # tokens whose KV is on the accelerator
    blocks: int = 0  # blocks of KV it holds
    saved_blocks: int = 0  # of its blocks, how many the host has too: what a preemption does not lose
    restore_blocks: int = 0  # blocks to bring back from the host before it can run
    running: bool = False
    last_token: float | None = None  # when its latest output token was made; None before the first
    last_served: float = 0.0  # when it last had tokens in an iteration
    slo: TurnTargets = DEFAULT_TARGETS
    refused: bool = False  # the engine had no place for it when it was last to start
    queue_weight: float = (
        0.0  # what its class and priority are worth where it waits (`placement/priorities.py`)
    )
    priority_s: float = 0.0  # of that, its priority, which whoever asks may choose

    @property
    def pending(self) -> int:
        """Tokens to compute before the next output token."""
        left = self.tokens - self.computed
        return left if left > 1 else 1

    @property
    def decoding(self) -> bool:
        """Whether it has had its first token, or has it under way, and lacks only the next."""
        if not self.running or self.tokens - self.computed > 1:
            return False
        return self.last_token is not None or self.computed >= self.tokens

    @property
    def worth_s(self) -> float:
        """Of its class, beside others that run: offline work is worth less than any, and a priority nothing,
        or each client could take others' tokens."""
        if self.offline:
            return -math.inf
        return 0.0 if self.queue_weight == self.priority_s else worth_of(self.queue_weight, self.priority_s)

    @property
    def place_s(self) -> float:
        return place_of(self.queue_weight, self.priority_s)

    @property
    def claims_s(self) -> float:
        """What others leave their place for: its class, and where it will wait, must both say so."""
        return min(worth_of(self.queue_weight, self.priority_s), self.queue_weight)

    def deadline(self) -> float:
        """When its next token is due."""
        if self.last_token is None:
            return self.arrival + self.slo.ttft_s
        return self.last_token + self.slo.tbt_s


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine between two iterations. `online_waiting` is in order of arrival, or as a plan has put it."""

    now: float
    running: tuple[RequestView, ...]
    online_waiting: tuple[RequestView, ...]
    offline_waiting: int
    offline_head: RequestView | None  # the offline request that waits longest, if any
    free_blocks: int
    total_blocks: int
    block_tokens: int
    max_tokens: int  # per iteration
    max_running: int


@dataclass(slots=True)
class BatchBuilder:
    """Builder of an iteration's batch. The engine offers candidates in order; each is told its tokens."""

    model: LatencyModel
    work: BatchWork  # of online requests, running and waiting; offline joins as it is taken
    tokens_left: int  # of the iteration, not spoken for by online requests
    target_s: float | None  # what the iteration may take; None: as long as it likes
    online_left: int | None = None  # tokens online requests may still take; None: all there are
    slots_left: int | None = None  # more offline requests than this do not join; None: no limit
    floor: Callable[[RequestView], int] = lambda request: 0  # of an offline request, whatever the target says
    admit_waiting: bool = True  # whether offline requests that hold no memory may start
    caps: Mapping[str, int] = field(default_factory=dict)  # of requests; others get all they want
    planned: frozenset[str] | None = None  # waiting online requests that have a plan; None: they need none
    unplanned_s: float = math.inf  # how long the iteration may be with one that has none
    offline_tokens: int = 0

    def offline_budget(self) -> int:
        """Offline tokens that still fit: those of a request without context, by the model."""
        if self.target_s is None:
            return self.tokens_left
        return self.model.max_tokens(self.work, 0, self.tokens_left, self.target_s)

    def take(self, request: RequestView, want: int) -> int:
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
            # What it waited for came after the plan. It is not to lose an iteration by that.
            want = max(1, self.model.max_tokens(self.work, request.computed, want, self.unplanned_s))
            self.work = self.work.plus(want, request.computed)
        if self.online_left is None:
            return want
        tokens = min(want, self.online_left)
        self.online_left -= tokens
        return tokens


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """What a policy decides before an iteration."""

    order: tuple[str, ...]  # of the running requests
    preempt: tuple[str, ...]  # running offline requests that give their memory and slot back now
    builder: BatchBuilder = field(compare=False)
    # Online requests that wait, in the order in which the engine is to look at them; None: by arrival.
    waiting: tuple[str, ...] | None = None
    yields: bool = False  # its prompts are of a lesser class than one that may come: to be left for it


@dataclass(frozen=True, slots=True)
class YieldingPrompts:
    """Prompts of one place in an iteration that yields."""

    place_s: float
    work: BatchWork
    slack_s: float  # from the iteration's start until the first of their tokens is due


@dataclass(frozen=True, slots=True)
class RunningBatch:
    """The iteration on the accelerator, as an arrival finds it."""

    work: BatchWork
    online_work: BatchWork  # without `prompts`
    offline_requests: int
    online_requests: int
    seconds: float  # the model's estimate for all of it
    passed_s: float
    slack_s: float | None  # from its start until the first token of `online_work` is due; None: none is
    prompts: tuple[YieldingPrompts, ...] = ()  # which an arrival of a better class goes before

    def beside(self, claims_s: float) -> "RunningBatch":
        """With the prompts that keep their place beside such an arrival among its online work."""
        stays = [prompts for prompts in self.prompts if prompts.place_s >= claims_s]
        if not stays:
            return self
        due = [prompts.slack_s for prompts in stays]
        return replace(
            self,
            online_work=sum((prompts.work for prompts in stays), self.online_work),
            slack_s=min(due if self.slack_s is None else [self.slack_s, *due]),
            prompts=tuple(prompts for prompts in self.prompts if prompts.place_s < claims_s),
        )


@dataclass(frozen=True, slots=True)
class IterationDone:
    """An iteration that ended: what was expected of it and what it took."""

    now: float
    work: BatchWork
    predicted_s: float
    seconds: float
    online_requests: int
    offline_requests: int
    late_requests: int  # online requests whose token came after its deadline
    aborted: bool


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What a fleet file may set for an engine's policy; the rest are constants of the policies."""

    policy: str = "conserve"
    slo: TurnTargets = DEFAULT_TARGETS  # of requests that bring none
    margin: float = 0.1  # of a target kept free for what the model gets wrong (conserve: until it knows)
    safepoints: bool = True  # off: arrivals never raise the flag
    offline_share: float = 0.0  # of an iteration's tokens that offline work gets at least; 0: none
    ageing_s: float | None = None  # an offline request not served for this long gets one token an iteration


class ServingPolicy(ABC):
    """Decides what an engine does next. Called by the engine's scheduler and by the simulator.

    `plan` before every iteration, then `builder.take` for every candidate in order, `observe` after it.
    """

    def __init__(self, settings: ServingSettings) -> None:
        self._settings = settings

    @abstractmethod
    def plan(self, view: EngineView, model: LatencyModel) -> IterationPlan: ...

    def start_order(self, request: RequestView) -> tuple[float, ...]:
        """Sorting key of offline requests that wait: the least starts first."""
        return (request.arrival,)

    def interrupts(
        self, arrival: RequestView, queued: BatchWork, batch: RunningBatch, model: LatencyModel
    ) -> bool:
        """Whether an arrival is worth aborting the iteration for. Called on another thread while one runs
        that has offline requests or yields: it must not change the policy's state.
        """
        return False

    def worth_arming(self, seconds: float, online_s: float) -> bool:
        """Whether an iteration with offline requests, predicted to take `seconds`, is worth leaving early.

        An armed iteration runs as pieces of CUDA graphs, and its host waits for the device. `online_s`: what
        its online requests would take alone, which an abort makes them do again; 0 without any.
        """
        return False

    @property
    def best_of_late_s(self) -> float:
        """What the best class of late is worth: prompts of lesser ones may yield; minus infinity: none."""
        return -math.inf

    def observe(self, done: IterationDone) -> None:  # noqa: B027  a policy may learn nothing
        """An iteration ended."""
