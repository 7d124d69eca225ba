"""conserve plan: how many decoders a workload needs, what binds, and what a power cap saves."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.errors import CommandError
from placement.power import PowerError
from placement.provisioning import Capacity, Means, Provision, ProvisioningError, prefillers_for, provision
from traces import importers
from traces.format import NotATrace, Trace, TraceError, load
from traces.planner.plan import Plan, PlanRequest
from traces.planner.plan import plan as make
from traces.simulator.profiles import ProfileError, find

console = Console(highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    app.command()(plan)


def plan(
    trace: Annotated[Path | None, typer.Argument(help="A trace; else give the means below")] = None,
    rate: Annotated[float, typer.Option(help="Conversations a second", min=0)] = 1.0,
    profile: Annotated[str, typer.Option(help="Of a decoder: a name or a JSON file")] = "a40-qwen3-0.6b",
    prefiller_profile: Annotated[str, typer.Option(help="Of a prefiller; by default the same")] = "",
    park_after: Annotated[float, typer.Option(help="Idle KV leaves the accelerator after, s", min=0)] = 60.0,
    large_append: Annotated[int, typer.Option(help="Tokens above which a turn is prefilled again")] = 8192,
    caps: Annotated[str, typer.Option(help="Power caps of the decoders to compare, W: 300,250,200")] = "",
    ttft: Annotated[float, typer.Option(help="Target of a first turn, s", min=0)] = 2.0,
    tbt: Annotated[float, typer.Option(help="Target between tokens, s", min=0)] = 0.1,
    first_turn_tokens: Annotated[float, typer.Option(help="L_in")] = 15_000,
    decoder_tokens: Annotated[float, typer.Option(help="L_d")] = 1_000,
    lifetime: Annotated[float, typer.Option(help="W, s")] = 15,
    peak_tokens: Annotated[float, typer.Option(help="KV of a conversation at its end")] = 16_000,
    prefill_rate: Annotated[float, typer.Option(help="T_p, tokens/s")] = 25_000,
    decode_rate: Annotated[float, typer.Option(help="T_d, tokens/s")] = 1_000,
    kv_tokens: Annotated[float, typer.Option(help="KV of a decoder")] = 300_000,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan")] = None,
) -> None:
    """Inequalities (1) and (2) of the conversation paper; with a trace, checked by simulation."""
    try:
        if trace is None:
            means = Means(first_turn_tokens, decoder_tokens, lifetime, peak_tokens)
            capacity = Capacity(prefill_rate, decode_rate, kv_tokens)
            found = provision(means, capacity, prefillers_for(means, capacity, rate), rate)
            _show_provision("from the means given", found)
            made = asdict(found)
        else:
            watts = tuple(float(cap) for cap in caps.split(",")) if caps else ()
            request = PlanRequest(rate, park_after, large_append, watts, ttft, tbt)
            decoder = find(profile)
            prefiller = find(prefiller_profile) if prefiller_profile else decoder
            whole = make(_any(trace).conversations, prefiller, decoder, request)
            _show_plan(whole, request)
            made = asdict(whole)
    except (ProfileError, ProvisioningError, PowerError, TraceError, ValueError) as error:
        raise CommandError(str(error)) from error
    if json_file:
        json_file.write_text(json.dumps(made, indent=2) + "\n")


def _any(path: Path) -> Trace:
    try:
        return load(path)
    except NotATrace:
        return importers.import_files([path])


def _show_provision(title: str, found: Provision) -> None:
    load = found.load
    console.print(
        f"[bold]{title}[/]: {found.prefillers} prefillers, {found.decoders} decoders for {found.rate:g}/s\n"
        f"  the prefillers fill at R* = {found.saturating_rate:.3f}/s; "
        f"a decoder has B = {found.slots:.1f} slots\n"
        f"  decoders by throughput (1): {found.by_throughput:.2f}, by memory (2): {found.by_memory:.2f}; "
        f"{found.bound.value} binds\n"
        f"  load: prefill {load.prefill:.0%}, decoding {load.decode:.0%}, decoder memory {load.memory:.0%}; "
        f"{load.saturates_first} fill first"
    )


def _show_plan(made: Plan, request: PlanRequest) -> None:
    measured, check = made.measured, made.check
    pinned, parked = measured.pinned, measured.parked
    console.print(
        f"a conversation: {pinned.first_turn_tokens:.0f} tokens in its first turn, "
        f"{pinned.decoder_tokens:.0f} on its decoder, {pinned.peak_kv_tokens:.0f} of KV at most,\n"
        f"  lives {pinned.resident_s:.0f} s, of which {parked.resident_s:.0f} s on the accelerator "
        f"when idle KV is parked after {request.park_after_s:g} s;\n"
        f"  {measured.large_turns:.1%} of later turns append more than {request.large_append} tokens"
    )
    _show_provision("KV on the decoder for life (the paper's rule)", made.pinned)
    _show_provision("idle KV parked", made.parked)
    console.print(
        f"[bold]simulated[/] with parking, {check.conversations} conversations: first-turn TTFT p95 "
        f"{check.first_ttft_p95_s:.3f} s, later {check.later_ttft_p95_s:.3f} s, TBT p95 "
        f"{check.tbt_p95_s * 1e3:.1f} ms, wait for a place {check.gate_wait_mean_s:.2f} s on average: "
        + ("the targets hold" if check.holds else "[red]the targets do not hold[/]")
    )
    for energy in made.energy:
        console.print(
            f"  decoders at {energy.cap_w:.0f} W: {energy.joules_per_conversation:.0f} J a conversation, "
            f"{energy.tokens_per_joule:.1f} tokens/J, TTFT p95 {energy.ttft_p95_s:.3f} s, "
            f"TBT p95 {energy.tbt_p95_s * 1e3:.1f} ms"
        )
