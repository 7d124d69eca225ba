"""conserve simulate, plan: what a fleet would do with a workload, and how large it must be."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import product
from math import isnan
from pathlib import Path
from typing import Annotated, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.common import any_trace
from deploy.errors import DeployError
from deploy.fleet import load_fleet
from deploy.fleet.components import placer_settings
from deploy.fleet.overload_checks import in_the_way, model_in_the_way
from deploy.fleet.schema import FleetSpec
from placement.engines import Role
from placement.overload.drop_plan import DropLimits, DropPlan, EngineShape, Member, NotDropped, plan_drop
from placement.prefetch_rules import PARK_AFTER_S
from placement.scheduling.interface import DEFAULT_TARGETS
from placement.sizing.provisioning import Capacity, Means, Provision, prefillers_for, provision
from traces.describe import LARGE_APPEND_TOKENS
from traces.planner import Candidate, FleetPlan, PlanRequest
from traces.planner import plan_fleet as make
from traces.simulator.dropping import DroppingSettings
from traces.simulator.metrics import SimulationSummary, summarise
from traces.simulator.policies import OverloadPolicy, System, SystemSettings
from traces.simulator.profiles import NAMED, find
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

app = typer.Typer()
console = Console()
prose = Console(highlight=False, soft_wrap=True)
PROFILE_OF_DEVICE = {"cpu": "laptop", "cuda": "a40-qwen3-0.6b"}


def simulated_fleet(file: FleetSpec, profile: EngineProfile) -> SimulatedFleet:
    """Tiers of the file; what its arguments say about chunks and KV goes before the profile."""
    tiers = []
    for tier in file.tiers:
        engine = _with_arguments(profile, file.engine.args | tier.args)
        if tier.power_cap_w is not None:
            engine = engine.capped(tier.power_cap_w)
        tiers.append(SimulatedTier(tier.name, tier.role, tier.replicas, engine))
    return SimulatedFleet(tuple(tiers))


def simulation_settings(
    file: FleetSpec,
    system: System | None,
    error_rate: float,
    seed: int,
    overload: OverloadPolicy | None = None,
) -> SimulationSettings:
    """The file's own policy, unless another system is to be tried on the same fleet."""
    placer = placer_settings(file)
    prefixes = [(file.engine.args | tier.args).get("enable-prefix-caching") for tier in file.tiers]
    return SimulationSettings(
        SystemSettings(system or System.of(placer), error_rate=error_rate),
        placer,
        pressure=(overload or OverloadPolicy.PARK).pressure,
        park_after_s=file.conversation.park_after,
        linger_s=file.conversation.ttl,
        tbt_s=file.coserving.tbt,
        prefillers_cache=all(cached is not False for cached in prefixes),  # vLLM's default
        reserved_until_held=True,
        dropping=_dropping(file) if overload is OverloadPolicy.DROP else None,
        seed=seed,
    )


def _dropping(file: FleetSpec) -> DroppingSettings:
    return DroppingSettings(DropLimits(file.coserving.tbt))


def _with_arguments(profile: EngineProfile, args: dict[str, object]) -> EngineProfile:
    chunk, blocks, block = (
        args.get(name) for name in ("max-num-batched-tokens", "num-gpu-blocks-override", "block-size")
    )
    if isinstance(chunk, int):
        profile = replace(profile, chunk_tokens=chunk)
    if isinstance(blocks, int) and isinstance(block, int):
        profile = replace(profile, kv_tokens=blocks * block)
    return profile


SHOWN = {
    "conversations": "conversations",
    "refused": "  refused: first prompt fits no decoder",
    "abandoned": "  given up: grew beyond its decoder",
    "ttfet_p50_s": "TTFET p50, s (tools included)",
    "ttfet_p95_s": "TTFET p95, s",
    "first_turn_ttft_p50_s": "TTFT of first turns p50, s",
    "first_turn_ttft_p95_s": "TTFT of first turns p95, s",
    "later_turn_ttft_p50_s": "TTFT of later turns p50, s",
    "later_turn_ttft_p95_s": "TTFT of later turns p95, s",
    "last_turn_tbt_p50_s": "TBT of last turns p50, s",
    "last_turn_tbt_p95_s": "TBT of last turns p95, s",
    "token_gap_p99_s": "time between two tokens p99, s",
    "e2e_p50_s": "whole conversation p50, s",
    "e2e_p95_s": "whole conversation p95, s",
    "gate_wait_mean_s": "wait for a decoder with capacity, mean, s",
    "transfers": "KV transfers",
    "through_prefiller_again": "later turns through a prefiller",
    "recomputed_tokens": "tokens computed again",
    "parked_tokens": "tokens parked on the host",
    "preemptions": "turns that gave way to others",
    "last_resorts": "conversations that a prefiller holds",
    "tokens_per_joule": "tokens per joule",
    "joules_per_conversation": "joules a conversation",
    "horizon_s": "seconds until all was served",
    "drops": "groups of engines that share a model's layers",
    "split_s": "  seconds while there were some",
    "events": "events simulated",
}


@app.command()
def simulate(
    fleet: Annotated[Path, typer.Argument(help="A fleet file")],
    trace: Annotated[Path, typer.Argument(help="A trace, ours or of a kind that can be imported")],
    policy: Annotated[
        str,
        typer.Option(help=f"One or several, with commas: {', '.join(System)}; by default the file's own"),
    ] = "",
    overload: Annotated[
        str,
        typer.Option(
            help=f"What gives way when the KV does not suffice, one or several: {', '.join(OverloadPolicy)}; "
            "by default park. preempt: as plain vLLM behind the fleet's gate, which keeps first turns out; "
            "drop: parameters of pairs"
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            help=f"Of an engine: {', '.join(NAMED)}, a JSON file, or a result of `conserve replay --json`; "
            "by default the one for the file's device"
        ),
    ] = "",
    error_rate: Annotated[
        float, typer.Option(help="Share of ampd's predictions that are wrong", min=0, max=1)
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result")] = None,
) -> None:
    """Play a trace on a fleet that is computed, and say what came of it."""
    file = load_fleet(fleet)
    systems = _chosen("--policy", policy, System)
    gives_way = _chosen("--overload", overload, OverloadPolicy)
    name = profile or PROFILE_OF_DEVICE[file.engine.device]
    engine, found = find(name), any_trace(trace)
    summaries = []
    with console.status("") as status:
        for wanted, way in product(systems, gives_way):
            settings = simulation_settings(file, wanted, error_rate, seed, way)
            system = settings.system.system.value + (f", {way}" if way else "")
            status.update(f"{system}: {len(found.conversations):,} conversations on profile {name}")
            result = Simulation(simulated_fleet(file, engine), settings).run(found.conversations)
            summaries.append(summarise(system, result))
    _show(summaries, name)
    if json_file:
        _write(json_file, [asdict(summary) for summary in summaries])


def _write(file: Path, result: object) -> None:
    """A figure that there is none of, as the TTFT of later turns where there are none, is null."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    file.write_bytes(orjson.dumps(result, default=list, option=options | orjson.OPT_APPEND_NEWLINE))


Chosen = TypeVar("Chosen", bound=StrEnum)


def _chosen(option: str, names: str, of: type[Chosen]) -> list[Chosen | None]:
    """None alone: nothing was chosen."""
    try:
        return [of(name.strip()) for name in names.split(",")] if names else [None]
    except ValueError as wrong:
        raise DeployError(f"{option}: {wrong}; give some of {', '.join(of)}") from wrong


def _show(summaries: list[SimulationSummary], profile: str) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column(f"profile {profile}", no_wrap=True)
    for summary in summaries:
        table.add_column(summary.system, justify="right")
    for field, label in SHOWN.items():
        table.add_row(label, *(_number(getattr(summary, field)) for summary in summaries))
    console.print(table)
    if lost := max(summary.refused + summary.abandoned for summary in summaries):
        console.print(
            f"[yellow]{lost} conversations were not served to their end: their context does not fit a "
            "decoder. `conserve trace scale --lengths` or `--max-context` makes them fit.[/]"
        )


def _number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@app.command()
def plan(
    trace: Annotated[Path | None, typer.Argument(help="A trace; else give the means below")] = None,
    overload: Annotated[
        Path | None,
        typer.Option(help="A fleet file: whose parameters could give way to KV, and nothing else is planned"),
    ] = None,
    rate: Annotated[float, typer.Option(help="Conversations a second", min=0)] = 1.0,
    profile: Annotated[
        str,
        typer.Option(help="Of a decoder: a name or a JSON file; by default a40-qwen3-0.6b, or the device's"),
    ] = "",
    prefiller_profile: Annotated[str, typer.Option(help="Of a prefiller; by default the same")] = "",
    park_after: Annotated[
        float, typer.Option(help="Idle KV leaves the accelerator after, s", min=0)
    ] = PARK_AFTER_S,
    large_append: Annotated[
        int, typer.Option(help="Tokens above which a turn is prefilled again")
    ] = LARGE_APPEND_TOKENS,
    caps: Annotated[
        str,
        typer.Option(help="Power caps of decoders to compare, W: 250,200; else 5/6 and 2/3 of their limit"),
    ] = "",
    ttft: Annotated[float, typer.Option(help="Target of a first turn, s", min=0)] = DEFAULT_TARGETS.ttft_s,
    tbt: Annotated[float, typer.Option(help="Target between tokens, s", min=0)] = DEFAULT_TARGETS.tbt_s,
    first_turn_tokens: Annotated[float, typer.Option(help="L_in")] = 15_000,
    decoder_tokens: Annotated[float, typer.Option(help="L_d")] = 1_000,
    lifetime: Annotated[float, typer.Option(help="W, s")] = 15,
    peak_tokens: Annotated[float, typer.Option(help="KV of a conversation at its end")] = 16_000,
    prefill_rate: Annotated[float, typer.Option(help="T_p, tokens/s")] = 25_000,
    decode_rate: Annotated[float, typer.Option(help="T_d, tokens/s")] = 1_000,
    kv_tokens: Annotated[float, typer.Option(help="KV of a decoder")] = 300_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan")] = None,
) -> None:
    """How many prefillers and decoders, at which power: by the conversation paper's inequalities, and with a
    trace by simulations in which a turn is computed where its first token comes first.
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
        whole = make(any_trace(trace).conversations, prefiller, decoder, request)
        _show_plan(whole, request)
        made = asdict(whole) | {
            "advised": asdict(whole.advised),
            "prefillers_needed": whole.prefillers_needed,
        }
    if json_file:
        _write(json_file, made)


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
            prose.print(f"  in the way of doing it live: {reason}")
    if not plans:
        raise DeployError(
            f"profile {name} says nothing of layers: give one with layers, layer_bytes and activation_bytes"
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
        f"[bold]where its first token comes first[/] (placement.first_turns: elastic), "
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
        prose.print(f"  [yellow]{made.too_large} conversations outgrow a decoder's KV and are left out[/]")


def _candidate(one: Candidate) -> str:
    return (
        f"TTFT p95 first {_number(one.first_ttft_p95_s)}, later {_number(one.later_ttft_p95_s)} s, "
        f"TBT p95 {_number(one.tbt_p95_s * 1e3)} ms, wait for a place {one.gate_wait_mean_s:.2f} s, "
        f"{one.joules_per_conversation:,.0f} J a conversation, {one.tokens_per_joule:.1f} tokens/J: "
        + ("the targets hold" if one.holds else "[red]the targets do not hold[/]")
    )


# `conserve plan --overload`: whose parameters could give way, for how much KV, at what cost.

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
