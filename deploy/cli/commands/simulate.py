"""conserve simulate FLEET TRACE: what this fleet, or another design on it, would do with this workload."""

import json
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deploy import simulated
from deploy.cli.errors import CommandError
from deploy.fleet import load_fleet
from traces import importers
from traces.format import NotATrace, Trace, TraceError, load
from traces.simulator.conservation import Leak
from traces.simulator.policies import System
from traces.simulator.profiles import NAMED, ProfileError, find
from traces.simulator.simulation import Simulation
from traces.simulator.summary import Summary, summarise

console = Console()

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
    "e2e_p50_s": "whole conversation p50, s",
    "e2e_p95_s": "whole conversation p95, s",
    "gate_wait_mean_s": "wait for a decoder with room, mean, s",
    "transfers": "KV transfers",
    "through_prefiller_again": "later turns through a prefiller",
    "recomputed_tokens": "tokens computed again",
    "parked_tokens": "tokens parked on the host",
    "tokens_per_joule": "tokens per joule",
    "joules_per_conversation": "joules a conversation",
    "horizon_s": "seconds until all was served",
    "events": "events simulated",
}


def register(app: typer.Typer) -> None:
    app.command()(simulate)


def simulate(
    fleet: Annotated[Path, typer.Argument(help="A fleet file")],
    trace: Annotated[Path, typer.Argument(help="A trace, ours or of a kind that can be imported")],
    systems: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(System)}; by default the file's policy")
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
    try:
        chosen = [_system(name.strip()) for name in systems.split(",")] if systems else [System(file.policy)]
        name = profile or simulated.PROFILE_OF_DEVICE[file.engine.device]
        engine, found = find(name), _any(trace)
        summaries = []
        with console.status("") as status:
            for system in chosen:
                status.update(f"{system.value}: {len(found.conversations):,} conversations on profile {name}")
                settings = simulated.settings(file, system, error_rate, seed)
                result = Simulation(simulated.simulated(file, engine), settings).run(found.conversations)
                summaries.append(summarise(system.value, result))
    except (ProfileError, TraceError, Leak, ValueError) as error:
        raise CommandError(str(error)) from error
    _show(summaries, name)
    if json_file:
        json_file.write_text(json.dumps([asdict(summary) for summary in summaries], indent=2) + "\n")


def _system(name: str) -> System:
    try:
        return System(name)
    except ValueError as wrong:
        raise CommandError(f"no system {name!r}: give some of {', '.join(System)}") from wrong


def _any(path: Path) -> Trace:
    try:
        return load(path)
    except NotATrace:
        return importers.import_files([path])


def _show(summaries: list[Summary], profile: str) -> None:
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
