"""What `conserve plan --overload` says: whose parameters could give way, for how much KV, at what cost."""

from collections.abc import Iterator
from dataclasses import dataclass

from deploy.fleet.schema import FleetSpec
from placement.engines import Role
from placement.overload.dropping import DropLimits, DropPlan, EngineShape, Member, NotDropped, plan_drop
from traces.simulator.tiers import SimulatedFleet

WHY = {
    NotDropped.ENOUGH: "more is not asked for",
    NotDropped.ALONE: "no other engine of this tier is left to share layers with",
    NotDropped.LARGEST: "groups may not be larger, or the model has no more layers",
    NotDropped.SPLIT: "the engines that are left share their layers already",
    NotDropped.NO_GAIN: "an engine would have no more KV than now",
    NotDropped.UNMEASURED: "the latency of these engines is not known: `conserve profile`",
    NotDropped.LINK: "the link between engines is too slow for activations, or for moving the KV in time",
    NotDropped.TBT: "iterations on all of the KV would be longer than the TBT target",
}


@dataclass(frozen=True)
class TierPlan:
    tier: str
    engines: int
    shape: EngineShape
    limits: DropLimits
    first: DropPlan  # as soon as anything is lacking
    most: DropPlan  # whatever is lacking


def tier_plans(file: FleetSpec, fleet: SimulatedFleet, mean_tokens: float) -> Iterator[TierPlan]:
    """Of tiers that hold conversations, with their KV full of turns that have `mean_tokens` each."""
    limits = DropLimits(file.coserving.tbt)
    for tier in fleet.tiers:
        shape = tier.profile.shape
        if tier.role is Role.PREFILL or shape is None:
            continue
        held, running = shape.kv_tokens, max(1, round(shape.kv_tokens / mean_tokens))
        engines = [[Member(f"{tier.name}-{number}", held, running)] for number in range(tier.replicas)]
        first, most = (plan_drop(engines, shape, lacking, limits) for lacking in (1.0, float("inf")))
        yield TierPlan(tier.name, tier.replicas, shape, limits, first, most)


def explained(plan: TierPlan, mean_tokens: float) -> Iterator[str]:
    shape, limits = plan.shape, plan.limits
    layers = shape.layers * shape.layer_bytes
    yield (
        f"tier {plan.tier}: {plan.engines} engines, each {shape.kv_tokens:,} tokens of KV "
        f"({shape.kv_tokens * shape.kv_bytes_per_token / 1e9:.1f} GB) and {layers / 1e9:.1f} GB in "
        f"{shape.layers} layers; full, it runs turns of {mean_tokens:,.0f} tokens"
    )
    for title, made in (("as soon as KV is lacking", plan.first), ("at most", plan.most)):
        gained = made.gained_tokens / (plan.engines * shape.kv_tokens)
        yield f"  {title}: {made.gained_tokens:,} tokens of KV more ({gained:.1%} of the tier's)"
        for group in made.merged:
            kept = ", ".join(
                f"{name} layers {layers.start}-{layers.stop - 1}"
                for name, layers in zip(group.engines, group.layers, strict=True)
            )
            yield (
                f"    {kept}: {group.kv_tokens:,} each ({group.kv_tokens / shape.kv_tokens - 1:+.1%}); an "
                f"iteration on all of it {group.split_s * 1e3:.1f} ms (now {group.whole_s * 1e3:.1f}, target "
                f"{limits.tbt_s * 1e3:.0f}); running turns stand still {group.exchange_s:.2f} s"
            )
    yield f"  no more: {WHY[plan.most.why_no_more]}"
