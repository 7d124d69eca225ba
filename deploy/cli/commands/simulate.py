"""conserve simulate: play a workload on a simulated fleet."""

from dataclasses import asdict, replace
from enum import StrEnum
from itertools import product
from math import isnan
from pathlib import Path
from typing import Annotated, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.common import FleetFile, any_trace
from deploy.errors import DeployError
from deploy.fleet import load_fleet
from deploy.fleet.components import placer_settings
from deploy.fleet.engine_arguments import arguments
from deploy.fleet.schema import FleetSpec
from placement.overload.drop_plan import DropLimits
from traces.simulator.dropping import DroppingSettings
from traces.simulator.metrics import SimulationSummary, summarise
from traces.simulator.policies import OverloadPolicy, System, SystemSettings
from traces.simulator.profiles import NAMED, find
from traces.simulator.simulation import Simulation, SimulationSettings
from traces.simulator.tiers import EngineProfile, SimulatedFleet, SimulatedTier

console = Console()
PROFILE_OF_DEVICE = {"cpu": "laptop", "cuda": "a40-qwen3-0.6b"}


def simulated_fleet(file: FleetSpec, profile: EngineProfile) -> SimulatedFleet:
    """Return a fleet file's tiers with engines of `profile`, but with the file's chunk and KV sizes."""
    tiers = []
    for tier in file.tiers:
        engine = _with_arguments(profile, arguments(file, tier))
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
    """Return the settings to simulate the file's fleet under `system`, by default under its own policy."""
    placer = placer_settings(file)
    prefixes = [arguments(file, tier).get("enable-prefix-caching") for tier in file.tiers]
    return SimulationSettings(
        SystemSettings(system or System.of(placer), error_rate=error_rate),
        placer,
        pressure=(overload or OverloadPolicy.PARK).pressure,
        park_after_s=file.conversation.park_after,
        linger_s=file.conversation.ttl,
        tbt_s=file.coserving.tbt,
        prefillers_cache=all(cached is not False for cached in prefixes),  # vLLM's default
        reserved_until_held=True,
        dropping=DroppingSettings(DropLimits(file.coserving.tbt))
        if overload is OverloadPolicy.DROP
        else None,
        seed=seed,
    )


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
    "idle_while_waiting": "engines idle while turns queue, share of the least busy role",
    "prefiller_share": "first turns that a prefiller computes, share",
    "least_kv_share": "conversations on the decoder with the least KV, share",
    "tokens_per_joule": "tokens per joule",
    "joules_per_conversation": "joules a conversation",
    "horizon_s": "seconds until all was served",
    "drops": "groups of engines that share a model's layers",
    "split_s": "  seconds while there were some",
    "events": "events simulated",
}


def simulate(
    fleet: FleetFile,
    trace: Annotated[Path, typer.Argument(help="A trace, of our format or one that can be imported")],
    policy: Annotated[
        str,
        typer.Option(
            help=f"One or more, separated by commas: {', '.join(System)}; by default the file's own"
        ),
    ] = "",
    overload: Annotated[
        str,
        typer.Option(
            help=f"What happens when the KV does not suffice, one or more: {', '.join(OverloadPolicy)}; "
            "by default park. preempt: as plain vLLM does, while first turns wait at the fleet's gate; "
            "drop: pairs of engines drop parameters"
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            help=f"Profile of an engine: {', '.join(NAMED)}, a JSON file, or a result of `conserve replay "
            "--json`; by default the one for the file's device"
        ),
    ] = "",
    error_rate: Annotated[
        float, typer.Option(help="Share of ampd's predictions that are wrong", min=0, max=1)
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of random draws")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result")] = None,
) -> None:
    """Play a trace on a simulated fleet and print latencies, transfers and energy."""
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
        write_json(json_file, [asdict(summary) for summary in summaries])


def write_json(file: Path, result: object) -> None:
    """Write a result as JSON, with null for NaN, such as the TTFT of later turns if there were none."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
    file.write_bytes(orjson.dumps(result, default=list, option=options | orjson.OPT_APPEND_NEWLINE))


Chosen = TypeVar("Chosen", bound=StrEnum)


def _chosen(option: str, names: str, of: type[Chosen]) -> list[Chosen | None]:
    """Return the members of enum `of` that the comma-separated `names` give; [None] if `names` is empty."""
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
        table.add_row(label, *(format_number(getattr(summary, field)) for summary in summaries))
    console.print(table)
    if lost := max(summary.refused + summary.abandoned for summary in summaries):
        console.print(
            f"[yellow]{lost} conversations were not served to their end: their context does not fit a "
            "decoder. `conserve trace scale --lengths` or `--max-context` makes them fit.[/]"
        )


def format_number(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
