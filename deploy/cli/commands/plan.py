"""conserve plan: say how large a fleet must be for a workload."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.commands.simulate import PROFILE_OF_DEVICE, format_number, simulated_fleet, write_json
from deploy.cli.common import any_trace
from deploy.errors import DeployError
from deploy.fleet import load_fleet
from deploy.fleet.overload_checks import in_the_way, model_in_the_way
from deploy.fleet.schema import FleetSpec
from placement.engines import Role
from placement.overload.drop_plan import DropLimits, DropPlan, EngineShape, Member, NotDropped, plan_drop
from placement.prefetch_rules import PARK_AFTER_S
from placement.scheduling.interface import DEFAULT_TARGETS
from placement.sizing.provisioning import TYPICAL, Capacity, Means, Provision, prefillers_for, provision
from traces.describe import LARGE_APPEND_TOKENS
from traces.planner import Candidate, FleetPlan, PlanRequest, plan_fleet
from traces.simulator.profiles import find
from traces.simulator.tiers import SimulatedFleet

prose = Console(highlight=False, soft_wrap=True)


def plan(
    trace: Annotated[Path | None, typer.Argument(help="A trace; without it, give the means below")] = None,
    overload: Annotated[
        Path | None,
        typer.Option(help="A fleet file: only show which engines could drop parameters for KV"),
    ] = None,
    rate: Annotated[float, typer.Option(help="Conversations a second", min=0)] = 1.0,
    profile: Annotated[
        str,
        typer.Option(
            help="Profile of a decoder: a name or a JSON file; by default a40-qwen3-0.6b, or the device's"
        ),
    ] = "",
    prefiller_profile: Annotated[str, typer.Option(help="Profile of a prefiller; by default --profile")] = "",
    park_after: Annotated[
        float, typer.Option(help="Seconds after which idle KV leaves the accelerator", min=0)
    ] = PARK_AFTER_S,
    large_append: Annotated[
        int, typer.Option(help="Appended tokens above which a later turn passes through a prefiller")
    ] = LARGE_APPEND_TOKENS,
    caps: Annotated[
        str,
        typer.Option(help="Power caps of decoders to compare, W: 250,200; else 5/6 and 2/3 of their limit"),
    ] = "",
    ttft: Annotated[float, typer.Option(help="TTFT target, first turns, s", min=0)] = DEFAULT_TARGETS.ttft_s,
    tbt: Annotated[float, typer.Option(help="TBT target, s", min=0)] = DEFAULT_TARGETS.tbt_s,
    first_turn_tokens: Annotated[
        float, typer.Option(help="Mean tokens of a first turn (L_in)")
    ] = TYPICAL.first_turn_tokens,
    decoder_tokens: Annotated[
        float, typer.Option(help="Mean tokens that a decoder computes (L_d)")
    ] = TYPICAL.decoder_tokens,
    lifetime: Annotated[
        float, typer.Option(help="Mean lifetime of a conversation, s (W)")
    ] = TYPICAL.resident_s,
    peak_tokens: Annotated[
        float, typer.Option(help="KV tokens of a conversation at its end")
    ] = TYPICAL.peak_kv_tokens,
    prefill_rate: Annotated[float, typer.Option(help="Prefill rate, tokens/s (T_p)")] = 25_000,
    decode_rate: Annotated[float, typer.Option(help="Decode rate, tokens/s (T_d)")] = 1_000,
    kv_tokens: Annotated[float, typer.Option(help="KV tokens of a decoder")] = 300_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan")] = None,
) -> None:
    """Say how many prefillers and decoders a workload needs, and at what power.

    With a trace, simulations with elastic placement give the numbers. Without one, the conversation paper's
    inequalities do, for the means that the options give.
    """
    if overload is not None:
        made = _plan_overload(load_fleet(overload), profile, peak_tokens)
    elif trace is None:
        means = Means(first_turn_tokens, decoder_tokens, lifetime, peak_tokens)
        capacity = Capacity(prefill_rate, decode_rate, kv_tokens)
        found = provision(means, capacity, prefillers_for(means, capacity, rate), rate)
        _show_provision("from the means given", found)
        made = asdict(found)
    else:
        request = PlanRequest(rate, park_after, large_append, _watts(caps), ttft, tbt)
        decoder = find(profile or PROFILE_OF_DEVICE["cuda"])
        prefiller = find(prefiller_profile) if prefiller_profile else decoder
        whole = plan_fleet(any_trace(trace).conversations, prefiller, decoder, request)
        _show_plan(whole, request)
        made = asdict(whole) | {
            "advised": asdict(whole.advised),
            "prefillers_needed": whole.prefillers_needed,
        }
    if json_file:
        write_json(json_file, made)


def _plan_overload(file: FleetSpec, profile: str, mean_tokens: float) -> dict[str, object]:
    name = profile or PROFILE_OF_DEVICE[file.engine.device]
    prose.print(f"profile {name}; overload.policy of the file: {file.overload.policy} (docs/overload.md)")
    fleet = simulated_fleet(file, find(name))
    plans = list(tier_plans(file, fleet, mean_tokens))
    for one in plans:
        for line in explained(one, mean_tokens):
            prose.print(line)
        of_tier = in_the_way(file, next(tier for tier in file.tiers if tier.name == one.tier))
        for reason in (*of_tier, *model_in_the_way(file)):
            prose.print(f"  cannot be done live: {reason}")
    if not plans:
        raise DeployError(
            f"profile {name} has no layers: give one with layers, layer_bytes and activation_bytes"
        )
    return {one.tier: asdict(one) for one in plans}


def _watts(caps: str) -> tuple[float, ...]:
    try:
        return tuple(float(cap) for cap in caps.split(",")) if caps else ()
    except ValueError as wrong:
        raise DeployError(f"--caps takes watts, as in 300,250, not {caps!r}") from wrong


def _show_provision(title: str, found: Provision) -> None:
    load = found.load
    prose.print(
        f"[bold]{title}[/]: {found.prefillers} prefillers, {found.decoders} decoders for {found.rate:g}/s\n"
        f"  the prefillers fill at R* = {found.saturating_rate:.3f}/s; "
        f"a decoder has B = {found.slots:.1f} slots\n"
        f"  decoders by throughput (1): {found.by_throughput:.2f}, by memory (2): {found.by_memory:.2f}; "
        f"{found.bound.value} binds\n"
        f"  load: prefill {load.prefill:.0%}, decoding {load.decode:.0%}, decoder memory {load.memory:.0%}; "
        f"{load.saturates_first} fill first"
    )


def _show_plan(made: FleetPlan, request: PlanRequest) -> None:
    measured = made.measured
    pinned, parked = measured.pinned, measured.parked
    prose.print(
        f"a conversation: {pinned.first_turn_tokens:.0f} tokens in its first turn, "
        f"{pinned.decoder_tokens:.0f} on its decoder, {pinned.peak_kv_tokens:.0f} of KV at most,\n"
        f"  lives {pinned.resident_s:.0f} s, of which {parked.resident_s:.0f} s on the accelerator "
        f"when idle KV is parked after {request.park_after_s:g} s;\n"
        f"  {measured.large_turns:.1%} of later turns append more than {request.large_append} tokens"
    )
    _show_provision("KV on the decoder for life (the paper's rule)", made.pinned)
    _show_provision("idle KV parked", made.parked)
    advised, without = made.advised, made.without_prefillers
    prose.print(
        f"[bold]first turns where their first token comes soonest[/] (placement.first_turns: elastic), "
        f"{made.conversations} conversations simulated: {advised.prefillers} prefillers, "
        f"{advised.decoders} decoders at {advised.cap_w:.0f} W"
    )
    for one in made.by_cap:
        prose.print(f"  {one.cap_w:4.0f} W: {_candidate(one)}")
    if made.elastic.prefillers:
        prose.print(f"  {without.decoders} engines, no prefiller: {_candidate(without)}")
    prose.print(
        "  prefillers are needed: without them it is slower, or takes more energy"
        if made.prefillers_needed
        else f"  a fleet without prefillers would do as well: {without.decoders} engines, all alike"
    )
    if made.ttft_s > request.ttft_s:
        prose.print(
            f"  [yellow]first turns take more than {request.ttft_s:g} s even alone: "
            f"planned for {made.ttft_s:.1f} s[/]"
        )
    if made.too_large:
        prose.print(f"  [yellow]{made.too_large} conversations outgrow a decoder's KV and were left out[/]")


def _candidate(one: Candidate) -> str:
    return (
        f"TTFT p95 first {format_number(one.first_ttft_p95_s)}, "
        f"later {format_number(one.later_ttft_p95_s)} s, "
        f"TBT p95 {format_number(one.tbt_p95_s * 1e3)} ms, wait for a decoder {one.gate_wait_mean_s:.2f} s, "
        f"{one.joules_per_conversation:,.0f} J a conversation, {one.tokens_per_joule:.1f} tokens/J: "
        + ("the targets hold" if one.holds else "[red]the targets do not hold[/]")
    )


# `conserve plan --overload`: which engines could drop parameters, for how much KV, at what cost.

WHY = {
    NotDropped.ENOUGH: "no more KV is needed",
    NotDropped.ALONE: "no other engine of this tier is left to share layers with",
    NotDropped.LARGEST: "a larger group is not allowed, or the model has too few layers for it",
    NotDropped.SPLIT: "the engines that are left share their layers already",
    NotDropped.NO_GAIN: "an engine would have no more KV than now",
    NotDropped.UNMEASURED: "the latency of these engines is not known: `conserve profile`",
    NotDropped.LINK: "the link between engines is too slow for activations, or for moving the KV in time",
    NotDropped.TBT: "iterations with all KV full would be longer than the TBT target",
}


@dataclass(frozen=True)
class TierPlan:
    tier: str
    engines: int
    shape: EngineShape
    limits: DropLimits
    first: DropPlan  # plan for the least lack of KV
    most: DropPlan  # plan for an unlimited lack of KV


def tier_plans(file: FleetSpec, fleet: SimulatedFleet, mean_tokens: float) -> Iterator[TierPlan]:
    """Yield which layers each tier with conversations would drop when turns of `mean_tokens` fill its KV."""
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
        yield f"  {title}: {made.gained_tokens:,} more tokens of KV ({gained:.1%} of the tier's)"
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
