"""Drop plan: which engines become one pipeline, which layers each engine keeps, and the KV that is gained.

This is the greedy plan of the KunServe paper: the two smallest groups of engines merge and drop one copy of
the parameters, until the lacking KV fits. A merge is not made if an engine would gain no KV, if the link is
too slow, or if iterations would miss the TBT target.

Every engine keeps serving its own conversations, and computes its layers for the whole group. So it has as
many regions of KV for each kept layer as the group has engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import pairwise

from placement.scheduling.latency_model import BatchWork, LatencyModel

MAX_GROUP_SIZE = 4  # engines; each reserves address space for the KV of this many when it starts


def layer_parts(layers: int, engines: int) -> tuple[range, ...]:
    """Split the layers over the engines of a group as evenly as possible; each layer is on one engine."""
    bounds = [index * layers // engines for index in range(engines + 1)]
    return tuple(range(*pair) for pair in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes and speeds of one kind of engine, from which the gain and cost of sharing layers are computed."""

    layers: int
    layer_bytes: float  # bytes of a layer's parameters, on all ranks of an engine
    kv_tokens: int  # tokens of KV that fit beside all layers
    kv_bytes_per_token: float  # in all layers
    activation_bytes: float  # bytes of one token's activation between two layers
    link_bytes_per_s: float  # from engine to engine, each way
    latency: LatencyModel | None  # of iterations with the whole model; None: not measured
    hop_s: float = 1e-4  # latency of one message

    def kept(self, engines: int) -> tuple[range, ...]:
        return layer_parts(self.layers, engines)

    def kv_each(self, engines: int) -> int:
        """Return the KV tokens that fit on each engine of a group of `engines` that share the layers."""
        layer_kv = self.kv_bytes_per_token / self.layers
        kept = max(len(layers) for layers in self.kept(engines))
        freed = (self.layers - kept) * self.layer_bytes
        return int((self.layers * self.kv_tokens + freed / layer_kv) / (kept * engines))

    def hops_s(self, engines: int, tokens: float) -> float:
        """Return the time in which a batch of `tokens` goes to each other engine and back."""
        return 2 * (engines - 1) * (self.hop_s + tokens * self.activation_bytes / self.link_bytes_per_s)

    def exchange_s(self, before: int, after: int, held: float) -> float:
        """Return the time in which an engine moves its `held` tokens of KV when its group changes its size.

        Only the KV of the layers that change engines moves; `before` and `after` are the numbers of engines.
        """
        moved = 1 - min(before, after) / max(before, after)
        return moved * held * self.kv_bytes_per_token / self.link_bytes_per_s

    def restore_s(self, engines: int) -> float:
        """Return the time of a restore: each of `engines` fetches its dropped layers from the others."""
        missing = self.layers - min(len(layers) for layers in self.kept(engines))
        return missing * self.layer_bytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Member:
    """Engine of a group, as a drop plan sees it."""

    engine: str
    held_tokens: float  # tokens of KV that cannot be evicted
    running: int


@dataclass(frozen=True, slots=True)
class DropLimits:
    tbt_s: float  # SLO target
    most_engines: int = MAX_GROUP_SIZE  # in a group
    exchange_s: float = 5.0  # how long running turns may stand still
    # Share of all KV that a plan gains in addition to the lacking KV. An overload grows while it is handled,
    # and where few engines have capacity, all new turns go there and wait for each other's prompts.
    reserve: float = 0.3
    link_share: float = 0.1  # share of an iteration that messages between engines may take


class NotDropped(StrEnum):
    """Reason why no further groups merge."""

    ENOUGH = "enough"  # the lacking KV and the reserve fit
    ALONE = "alone"  # no other engine of this kind is left to share layers with
    LARGEST = "largest"  # the group would have too many engines
    SPLIT = "split"  # the other engines share their layers already, and such groups do not grow
    NO_GAIN = "no_gain"  # an engine would have no more KV than now
    UNMEASURED = "unmeasured"  # the cost of the pipeline is unknown without a latency model
    LINK = "link"  # the link is too slow for activations, or the exchange of KV would take too long
    TBT = "tbt"  # iterations with all of the larger KV full would miss the SLO target


@dataclass(frozen=True, slots=True)
class SplitGroup:
    engines: tuple[str, ...]
    layers: tuple[range, ...]  # one entry for each engine
    kv_tokens: int  # tokens of KV on each engine
    whole_s: float  # seconds of an iteration with whole models and all of their KV full
    split_s: float  # seconds of an iteration of the group with all of its KV full
    exchange_s: float  # how long running turns stand still while the group is formed


@dataclass(frozen=True, slots=True)
class DropPlan:
    merged: tuple[SplitGroup, ...]  # new groups; all others stay
    gained_tokens: int
    why_no_more: NotDropped


def plan_drop(
    groups: Sequence[Sequence[Member]], shape: EngineShape, lacking_tokens: float, limits: DropLimits
) -> DropPlan:
    """Plan which of `groups` merge to gain `lacking_tokens` and the reserve, within `limits`.

    Only engines with whole models merge, each of which is a group of one. Other groups stay as they are.
    """
    # Among groups of one size the fullest goes first, because turns wait there.
    queue = [
        (len(group), -sum(one.held_tokens for one in group), min(one.engine for one in group), tuple(group))
        for group in groups
        if len(group) == 1
    ]
    heapify(queue)
    merged: dict[str, SplitGroup] = {}
    gained, why = 0, NotDropped.ALONE
    wanted = lacking_tokens
    if wanted > 0:
        whole = shape.kv_tokens * sum(len(group) for group in groups)
        had = sum(len(group) * shape.kv_each(len(group)) for group in groups) - whole
        wanted += max(0, limits.reserve * whole - had)  # earlier plans may have gained the reserve already
    while gained < wanted and len(queue) > 1:
        first, second = heappop(queue), heappop(queue)
        members = (*first[3], *second[3])
        made = _merge(first[3], second[3], shape, limits)
        if isinstance(made, NotDropped):
            why = made
            heappush(queue, second)  # `first`, which holds more, stays as it is
            continue
        for part in (first, second):
            merged.pop(part[2], None)
            gained -= part[0] * shape.kv_each(part[0])
        gained += len(members) * made.kv_tokens
        name = min(first[2], second[2])
        merged[name] = made
        heappush(queue, (len(members), first[1] + second[1], name, members))
    if gained >= wanted:
        why = NotDropped.ENOUGH
    elif why is NotDropped.ALONE and any(len(group) > 1 for group in groups):
        why = NotDropped.SPLIT
    return DropPlan(tuple(merged.values()), gained, why)


def _merge(
    first: tuple[Member, ...], second: tuple[Member, ...], shape: EngineShape, limits: DropLimits
) -> SplitGroup | NotDropped:
    members, size = (*first, *second), len(first) + len(second)
    if size > min(limits.most_engines, shape.layers):
        return NotDropped.LARGEST
    kv_tokens = shape.kv_each(size)
    if kv_tokens <= max(shape.kv_each(len(first)), shape.kv_each(len(second))):
        return NotDropped.NO_GAIN
    if shape.latency is None:
        return NotDropped.UNMEASURED
    whole_s, split_s = (full_iteration_s(shape, one, members) for one in (1, size))
    exchange_s = max(
        shape.exchange_s(len(part), size, one.held_tokens) for part in (first, second) for one in part
    )
    requests = kv_tokens / _mean_context(members)
    if shape.hops_s(size, requests) > limits.link_share * whole_s or exchange_s > limits.exchange_s:
        return NotDropped.LINK
    if split_s > limits.tbt_s:
        return NotDropped.TBT
    names = tuple(one.engine for one in members)
    return SplitGroup(names, shape.kept(size), kv_tokens, whole_s, split_s, exchange_s)


def full_iteration_s(shape: EngineShape, engines: int, members: Sequence[Member]) -> float:
    """Return the seconds of a decoding iteration when all KV of an engine in a group of `engines` is full.

    The turns that fill it are as long as the mean running turn of `members`.
    """
    assert shape.latency is not None
    tokens = shape.kv_each(engines)
    requests = round(tokens / _mean_context(members))
    work = BatchWork(requests, tokens, tokens, tokens, requests)
    return shape.latency.seconds(work) + shape.hops_s(engines, requests)


def _mean_context(members: Sequence[Member]) -> float:
    running = sum(one.running for one in members)
    return max(1.0, sum(one.held_tokens for one in members) / running) if running else 1024.0
