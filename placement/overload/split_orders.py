"""Split orders: which decoders form groups that share their layers, and which groups restore their models.

A new group consists of engines with whole models: two, or more if two do not gain enough KV. No other engine
joins it later: its engines would need whole models first, and the KV that they hold does not fit beside a
whole model. Engines report what a drop needs (`SplitState`); `plan_drop` forms the groups.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from placement.engines import SplitState
from placement.overload.drop_plan import DropLimits, Member, NotDropped, plan_drop
from placement.overload.signal import OverloadState


@dataclass(frozen=True, slots=True)
class SharingDecoder:
    """Decoder that can share its layers, as the orders see it."""

    engine: str
    tier: str
    held_tokens: float  # tokens of KV that cannot be evicted
    running: int
    split: SplitState
    leaving: bool = False  # the engine will end, so it must not share layers any more

    @property
    def gained_tokens(self) -> int:
        """Return how many more tokens of KV fit on the engine than with its whole model."""
        return self.split.kv_tokens - self.split.shape.kv_tokens if self.split.epoch else 0


@dataclass(frozen=True, slots=True)
class SplitOrders:
    drops: tuple[tuple[str, ...], ...] = ()  # new groups, each in the order of the parts of the layers
    restores: tuple[tuple[str, ...], ...] = ()  # groups that restore, each with its remaining engines
    why_no_more: NotDropped | None = None  # set where KV is lacking and nothing is dropped


def split_orders(
    state: OverloadState,
    decoders: Sequence[SharingDecoder],
    limits: DropLimits,
    unwilling: Collection[str] = (),
    *,
    silent: bool = False,
) -> SplitOrders:
    """Decide which groups drop layers and which restore them.

    Groups with an `unwilling` engine, which failed to carry out an order a while ago, are left as they are.
    `silent` means that some decoder does not report. This may be the member that a group seems to lack.
    """
    groups = [group for group in _groups(decoders) if not any(one.engine in unwilling for one in group)]
    parts = tuple(_names(group) for group in groups if _lacks_a_member(group))
    if parts and not silent:
        return SplitOrders(restores=parts)
    lacking = state.lacking_tokens - sum(one.gained_tokens for one in decoders)
    split = [group for group in groups if group[0].split.epoch and not _lacks_a_member(group)]
    left = [group for group in split if any(one.leaving for one in group)]
    if state.overloaded and lacking > 0 and not left:
        return _drops([group for group in groups if _may_be_planned(group)], lacking, limits)
    over = left if state.overloaded else [one for one in split if one in left or all(map(_fits, one))]
    return SplitOrders(restores=tuple(map(_names, over)))


def _names(group: Sequence[SharingDecoder]) -> tuple[str, ...]:
    return tuple(one.engine for one in group)


def _lacks_a_member(group: Sequence[SharingDecoder]) -> bool:
    split = group[0].split
    return split.epoch != 0 and len(group) <= len(split.partners)


def _may_be_planned(group: Sequence[SharingDecoder]) -> bool:
    return not _lacks_a_member(group) and not any(one.leaving for one in group)


def _fits(decoder: SharingDecoder) -> bool:
    """Return whether the decoder's KV in use would fit if it restored its whole model."""
    return decoder.held_tokens <= decoder.split.shape.kv_tokens


def _groups(decoders: Iterable[SharingDecoder]) -> list[list[SharingDecoder]]:
    """Group the decoders that share layers with each other; a decoder with a whole model is a group of one.

    The group's epoch alone does not identify it: a restarted directory may give the same epoch to a second
    group before the members of the first group have reported.
    """
    split: defaultdict[tuple[int, frozenset[str]], list[SharingDecoder]] = defaultdict(list)
    whole: list[list[SharingDecoder]] = []
    for one in decoders:
        if one.split.epoch:
            split[one.split.epoch, frozenset((one.split.peer, *one.split.partners))].append(one)
        else:
            whole.append([one])
    return [*whole, *split.values()]


def _drops(groups: Sequence[Sequence[SharingDecoder]], lacking: float, limits: DropLimits) -> SplitOrders:
    """Plan drops for each tier separately, because tiers may differ in speed or memory."""
    drops: list[tuple[str, ...]] = []
    why = NotDropped.ALONE
    for tier in sorted({group[0].tier for group in groups}):
        here = [group for group in groups if group[0].tier == tier]
        members = [[Member(one.engine, one.held_tokens, one.running) for one in group] for group in here]
        # Only engines that have exchanged KV know how slow their link is, so a plan uses the slowest.
        slowest = min(one.split.shape.link_bytes_per_s for group in here for one in group)
        shape = replace(here[0][0].split.shape, link_bytes_per_s=slowest)
        plan = plan_drop(members, shape, lacking, limits)
        drops += (merged.engines for merged in plan.merged)
        lacking, why = lacking - plan.gained_tokens, plan.why_no_more
        if lacking <= 0:
            break
    return SplitOrders(drops=tuple(drops), why_no_more=None if drops else why)
