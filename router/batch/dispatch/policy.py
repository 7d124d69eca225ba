"""Decides which offline requests go next, and to which engine. It has no I/O and no clock of its own."""

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from placement.engines import EngineState, Role
from router.batch.config import DispatchSettings
from router.batch.store.records import Backlog, group_of

QUEUE_AHEAD = 4  # requests that wait inside an engine, beyond those that run
SUSPECT_AFTER = 2  # failed tries, after which a request is a suspect: an engine gets one suspect at a time
_TIGHT_FRACTION = 0.25  # a batch is urgent if its estimated time and this margin exceed the time left
_URGENT_SHARE = 0.75  # share of the free places that urgent batches may take before the fair order
_WARM_WORTH = 0.5  # how much more loaded than the least loaded engine the holder of a prefix may be
_RATE_SPAN_S = 60.0


class Job(Protocol):
    @property
    def prefix(self) -> str: ...
    @property
    def est_tokens(self) -> int: ...
    @property
    def tries(self) -> int: ...


AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True, slots=True)
class EngineSlots:
    """Facts about an engine that limit the offline work it may be given."""

    engine: str
    role: Role
    kv_tokens: int
    state: EngineState | None  # None: it reports nothing
    in_flight: int  # offline requests that were sent to it and have not ended
    unseen_tokens: int  # tokens of the requests sent since its last report
    suspects: int  # suspects in flight (see `SUSPECT_AFTER`)
    resting: bool = False  # paused after errors
    starved: bool = False  # it had no offline work for longer than `ageing_s`


@dataclass(frozen=True, slots=True)
class Allowance:
    """Offline work that may be given to an engine now."""

    requests: int
    tokens: int


def allowance_of(engine: EngineSlots, settings: DispatchSettings) -> Allowance:
    """Return how much more work an engine may be given, so that its window of offline requests is full.

    The window has room for the offline requests that the engine runs now, and for a short queue that can be
    withdrawn at no cost. It grows with each report of an engine that runs all it gets, and shrinks to the
    queue if the engine runs nothing offline.
    """
    state = engine.state
    if engine.resting or (state is not None and (state.draining or state.shares_layers)):
        return Allowance(0, 0)
    if engine.role is Role.PREFILL and not (
        settings.harvest_prefill and (settings.coserving or _idle(state))
    ):
        return Allowance(0, 0)
    if state is None:
        tokens = max(0, engine.kv_tokens - engine.unseen_tokens)
        return Allowance(max(0, settings.blind_window - engine.in_flight), tokens)
    window = state.offline_running + QUEUE_AHEAD
    # KV of idle conversations that is also on the host can be evicted at no cost.
    spare = state.free_tokens + state.idle_tokens
    tokens = spare - int(settings.keep_free_fraction * engine.kv_tokens) - engine.unseen_tokens
    if state.waiting:  # online turns wait: at most one request is sent, for the engine's own ageing to run
        window = min(window, int(engine.starved))
    elif tokens <= 0:
        # Idle conversations may hold all KV for as long as they live. Requests then run one at a time in the
        # KV that is kept free, or a batch would never end.
        window = min(window, 1)
    # A request for several answers counts as several waiting ones in the engine's report.
    free = min(min(window, settings.max_in_flight) - engine.in_flight, QUEUE_AHEAD - state.offline_waiting)
    return Allowance(max(0, free), max(0, tokens))


def _idle(state: EngineState | None) -> bool:
    return state is not None and not state.running and not state.waiting


class FairShare:
    """Counts the tokens served for each owner; the owner with the fewest is next.

    An owner that returns with new work starts level with the least served owner: it has saved up no credit
    while it was away, and does not pay for having been alone before.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def restrict(self, busy: Collection[str]) -> None:
        """Start new owners level with the least served one, and forget owners without work."""
        staying = [served for owner, served in self._served.items() if owner in busy]
        level = min(staying, default=0.0)
        self._served = {owner: self._served.get(owner, level) for owner in busy}

    def next(self, candidates: Collection[str]) -> str:
        return min(candidates, key=lambda owner: (self._served.get(owner, 0.0), owner))

    def charge(self, owner: str, tokens: float) -> None:
        """Charge tokens to an owner; a negative number corrects an estimate that was too high."""
        if owner in self._served:
            self._served[owner] += tokens


class Rate:
    """Recent rate of offline work, in estimated tokens per second.

    It is weighted exponentially over about a minute, and 0 until something has finished.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started: float | None = None
        self._weighted = 0.0
        self._at = 0.0

    def idle(self) -> None:
        """Pause the rate while there is no work, so that later work does not start with a decayed rate."""
        self._started, self._weighted = None, 0.0

    def add(self, tokens: int) -> None:
        now = self._clock()
        if self._started is None:
            self._started = self._at = now
        self._weighted = self._weighted * math.exp(-(now - self._at) / _RATE_SPAN_S) + tokens
        self._at = now

    @property
    def value(self) -> float:
        if self._started is None:
            return 0.0
        now = self._clock()
        kept = self._weighted * math.exp(-(now - self._at) / _RATE_SPAN_S)
        seen = _RATE_SPAN_S * (1 - math.exp(-(now - self._started) / _RATE_SPAN_S))
        return kept / max(seen, 1.0)


def share_out(
    backlog: Sequence[Backlog], free: Allowance, fair: FairShare, now: float, tokens_per_s: float
) -> tuple[dict[int, int], int]:
    """Return how many lines to take from each batch, and how many of these lines go first as urgent.

    Urgent batches come first, in order of their deadlines, but get only a part of the free places: an owner
    cannot starve others by asking for short windows. The other places go to the owner served least, and of
    its batches to the one with the earliest deadline.
    """
    open_now = {b.batch: b.pending for b in backlog if b.accepting and b.pending > 0}
    by_deadline = sorted((b for b in backlog if b.batch in open_now), key=lambda b: (b.expires_at, b.batch))
    fair.restrict({b.owner for b in by_deadline})
    taken: dict[int, int] = {}
    tokens = free.tokens

    def take(batch: Backlog, count: int) -> int:
        nonlocal tokens
        fit = max(tokens // batch.est_tokens, 0 if taken else 1)  # a line larger than all free KV goes alone
        count = min(count, open_now[batch.batch], fit)
        tokens -= count * batch.est_tokens
        open_now[batch.batch] -= count
        taken[batch.batch] = taken.get(batch.batch, 0) + count
        fair.charge(batch.owner, count * batch.est_tokens)
        return count

    urgent = 0
    for_urgent = math.ceil(free.requests * _URGENT_SHARE)
    for batch in by_deadline:
        if urgent < for_urgent and _is_tight(batch, now, tokens_per_s):
            urgent += take(batch, for_urgent - urgent)
    left = free.requests - urgent
    while left > 0:
        first_of: dict[str, Backlog] = {}
        for batch in by_deadline:
            if open_now[batch.batch] > 0:
                first_of.setdefault(batch.owner, batch)
        if not first_of:
            break
        count = take(first_of[fair.next(first_of)], 1)
        if not count:
            break
        left -= count
    return {batch: count for batch, count in taken.items() if count}, urgent


def _is_tight(batch: Backlog, now: float, tokens_per_s: float) -> bool:
    if tokens_per_s <= 0:
        return False
    needed = (batch.pending + batch.leased) * batch.est_tokens / tokens_per_s
    return needed * (1 + _TIGHT_FRACTION) >= batch.expires_at - now


def assign(
    jobs: Iterable[AnyJob],
    engines: Sequence[EngineSlots],
    allowances: Mapping[str, Allowance],
    warm: Mapping[str, str],
) -> tuple[list[tuple[AnyJob, str]], list[AnyJob]]:
    """Assign each job to the engine that holds its prefix, or to the least loaded if that has far less load.

    Returns pairs of a job and its engine, and the jobs that fit on no engine now.
    """
    slots = {e.engine: allowances[e.engine].requests for e in engines if allowances[e.engine].requests > 0}
    tokens = {e.engine: allowances[e.engine].tokens for e in engines}
    suspects = {e.engine: e.suspects for e in engines}
    load = {e.engine: _load(e) for e in engines}
    step = {e.engine: 1 / (1 + slots[e.engine] + e.in_flight) for e in engines if e.engine in slots}
    heap = [(load[name], name) for name in slots]
    heapq.heapify(heap)
    warm_now = dict(warm)
    placed: list[tuple[AnyJob, str]] = []
    left: list[AnyJob] = []
    for job in jobs:
        while heap and (slots[heap[0][1]] <= 0 or heap[0][0] != load[heap[0][1]]):
            _, stale = heapq.heappop(heap)
            if slots[stale] > 0:
                heapq.heappush(heap, (load[stale], stale))
        if not heap:
            left.append(job)
            continue
        least, chosen = heap[0]
        holder = warm_now.get(group_of(job.prefix))
        if holder is not None and slots.get(holder, 0) > 0 and load[holder] <= least + _WARM_WORTH:
            chosen = holder
        suspect = job.tries >= SUSPECT_AFTER
        alone = slots[chosen] == allowances[chosen].requests  # the engine's first job in this pass
        if (suspect and suspects[chosen]) or (job.est_tokens > tokens[chosen] and not alone):
            left.append(job)
            continue
        slots[chosen] -= 1
        tokens[chosen] -= job.est_tokens
        suspects[chosen] += suspect
        load[chosen] += step[chosen]
        warm_now[group_of(job.prefix)] = chosen
        placed.append((job, chosen))
    return placed, left


def _load(engine: EngineSlots) -> float:
    """Return an engine's load: the share of its KV that is live, plus how full its offline window is."""
    if engine.state is None:
        return engine.in_flight / (1 + engine.in_flight)
    window = 1 + engine.state.offline_running + engine.state.offline_waiting
    live = engine.state.live_tokens / max(1, engine.kv_tokens)
    return live + engine.in_flight / (window + engine.in_flight)
