"""Drop plan: which engines become one pipeline, which layers each keeps, and the KV that this gives.

The KunServe paper's greedy plan: the two smallest groups of engines are merged, and drop one copy of the
parameters, until what is lacking fits. A merge that gives some engine no KV, whose link is too slow, or with
which iterations would miss the TBT target, is not made.

Every engine keeps serving its own conversations and computes its layers for all of the group, so each kept
layer has as many regions of KV as the group has engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import pairwise

from placement.scheduling.latency_model import BatchWork, LatencyModel

MOST_ENGINES = 4  # of a group: for the KV of so many, running engines reserve address space at their start


def parts_of(layers: int, engines: int) -> tuple[range, ...]:
    """Of each engine of a group: as equal as they can be, every layer on exactly one."""
    bounds = [index * layers // engines for index in range(engines + 1)]
    return tuple(range(*pair) for pair in pairwise(bounds))


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What splitting a model over engines of one kind depends on."""

    layers: int
    layer_bytes: float  # parameters of a layer, on all ranks of an engine
    kv_tokens: int  # with all layers
    kv_bytes_per_token: float  # of all layers
    activation_bytes: float  # of a token between two layers
    link_bytes_per_s: float  # from engine to engine, each way
    latency: LatencyModel | None  # of whole models; None: not measured
    hop_s: float = 1e-4  # of one message

    def kept(self, engines: int) -> tuple[range, ...]:
        return parts_of(self.layers, engines)

    def kv_each(self, engines: int) -> int:
        """Tokens of each engine's own conversations when so many share the layers."""
        layer_kv = self.kv_bytes_per_token / self.layers
        kept = max(len(layers) for layers in self.kept(engines))
        freed = (self.layers - kept) * self.layer_bytes
        return int((self.layers * self.kv_tokens + freed / layer_kv) / (kept * engines))

    def hops_s(self, engines: int, tokens: float) -> float:
        """A batch goes from its engine to each other one, and comes back."""
        return 2 * (engines - 1) * (self.hop_s + tokens * self.activation_bytes / self.link_bytes_per_s)

    def exchange_s(self, before: int, after: int, held: float) -> float:
        """KV of layers that change their engine, when a group of one size becomes one of another."""
        moved = 1 - min(before, after) / max(before, after)
        return moved * held * self.kv_bytes_per_token / self.link_bytes_per_s

    def restore_s(self, engines: int) -> float:
        """Parameters of the layers that an engine dropped, from its peers."""
        missing = self.layers - min(len(layers) for layers in self.kept(engines))
        return missing * self.layer_bytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Member:
    """An engine as a plan sees it."""

    engine: str
    held_tokens: float  # that cannot give way
    running: int


@dataclass(frozen=True, slots=True)
class DropLimits:
    tbt_s: float  # SLO target
    most_engines: int = MOST_ENGINES  # of a group
    grows: bool = True  # groups that are split already may merge; running engines cannot
    exchange_s: float = 5.0  # that running turns may stand still
    # Share of the KV that is given beyond what is lacking, once: demand that is declared goes on growing, and
    # where few engines have capacity, all new turns go there and wait for each other's prompts.
    reserve: float = 0.3
    link_share: float = 0.1  # of an iteration that may be spent between engines


class NotDropped(StrEnum):
    """Why groups stay as they are."""

    ENOUGH = "enough"  # what is lacking fits, and the reserve
    ALONE = "alone"  # no other engine of this kind is left to share the layers with
    LARGEST = "largest"  # the group would have more engines than it may
    SPLIT = "split"  # those that are left share their layers already, and such groups do not grow
    NO_GAIN = "no_gain"  # an engine would have no more KV than now
    UNMEASURED = "unmeasured"  # no latency model: what the pipeline costs is not known
    LINK = "link"  # too slow for activations, or the exchange of KV would take too long
    TBT = "tbt"  # iterations with the larger KV full would miss the SLO target


@dataclass(frozen=True, slots=True)
class SplitGroup:
    engines: tuple[str, ...]
    layers: tuple[range, ...]  # of each
    kv_tokens: int  # of each
    whole_s: float  # an iteration with the KV of whole models full
    split_s: float  # and with all of this
    exchange_s: float  # that running turns stand still before


@dataclass(frozen=True, slots=True)
class DropPlan:
    merged: tuple[SplitGroup, ...]  # groups that are new; all others stay
    gained_tokens: int
    why_no_more: NotDropped

    @property
    def drops(self) -> bool:
        return bool(self.merged)


def plan_drop(
    groups: Sequence[Sequence[Member]], shape: EngineShape, lacking_tokens: float, limits: DropLimits
) -> DropPlan:
    """`groups`: as they are now, an engine with a whole model being a group of one."""
    # The fullest goes first among those of one size: it is the one that has turns waiting.
    queue = [
        (len(group), -sum(one.held_tokens for one in group), min(one.engine for one in group), tuple(group))
        for group in groups
        if limits.grows or len(group) == 1
    ]
    heapify(queue)
    merged: dict[str, SplitGroup] = {}
    gained, why = 0, NotDropped.ALONE
    wanted = lacking_tokens
    if wanted > 0:
        whole = shape.kv_tokens * sum(len(group) for group in groups)
        had = sum(len(group) * shape.kv_each(len(group)) for group in groups) - whole
        wanted += max(0, limits.reserve * whole - had)  # once: a later plan adds what is lacking still
    while gained < wanted and len(queue) > 1:
        first, second = heappop(queue), heappop(queue)
        members = (*first[3], *second[3])
        made = _merge(first[3], second[3], shape, limits)
        if isinstance(made, NotDropped):
            why = made
            heappush(queue, second)  # the first, whose KV or turns are the most, stays as it is
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
    elif why is NotDropped.ALONE and not limits.grows and any(len(group) > 1 for group in groups):
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
    """Decoding with the KV full of turns as long as the members' are: the batch grows with the KV."""
    assert shape.latency is not None
    tokens = shape.kv_each(engines)
    requests = round(tokens / _mean_context(members))
    work = BatchWork(requests, tokens, tokens, tokens, requests)
    return shape.latency.seconds(work) + shape.hops_s(engines, requests)


def _mean_context(members: Sequence[Member]) -> float:
    running = sum(one.running for one in members)
    return max(1.0, sum(one.held_tokens for one in members) / running) if running else 1024.0
