"""conserve advise [FLEET]: what to change about a running fleet, and why."""

import asyncio
import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

from deploy.cli.errors import CommandError
from deploy.cli.names import home_of
from deploy.fleet import Fleet, load_fleet
from deploy.lifecycle import directory
from deploy.lifecycle.status import running
from placement.advice import Recommendation
from placement.capacity import Signals


def register(app: typer.Typer) -> None:
    app.command()(advise)


def advise(
    fleet: Annotated[str, typer.Argument(help="its name or file")] = "laptop",
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say whether the fleet has too few engines or more than it needs, with the numbers behind it."""
    home = home_of(fleet)
    run = running(home)
    answer = asyncio.run(directory.capacity(run.directory, home.secret()))
    if answer is None:
        raise CommandError(f"the directory of '{home.root.name}' does not answer: see conserve status")
    signals, advice = answer
    shape = load_fleet(home.fleet_file)
    if as_json:
        print(json.dumps(as_data(signals, advice, shape), indent=2))
        return
    print("\n".join(sentences(signals, advice, shape)))


def as_data(signals: Signals, advice: tuple[Recommendation, ...], fleet: Fleet) -> dict[str, Any]:
    saturates_in_s = signals.saturates_in_s(fleet.conversation.prefiller_wait)
    finite = {name: value if math.isfinite(value) else None for name, value in asdict(signals).items()}
    return {
        "signals": {**finite, "saturates_in_s": saturates_in_s if math.isfinite(saturates_in_s) else None},
        "window_s": fleet.capacity.window,
        "advice": [asdict(one) for one in advice],
    }


def sentences(signals: Signals, advice: tuple[Recommendation, ...], fleet: Fleet) -> list[str]:
    window = fleet.capacity.window
    lines = [
        f"prefillers: {signals.prefillers} up, {signals.prefill_load:.0%} of their time asked for, "
        f"shortest queue {signals.prefill_wait_s:.1f} s",
        f"decoders:   {signals.decoders} up, {signals.decoder_pressure:.0%} of their KV in use, "
        f"{signals.running_share:.0%} by turns under way",
    ]
    for one in advice:
        count = f" {one.count}" if one.count else ""
        lines.append(f"-> {one.action.value.replace('_', ' ')}{count}: {one.reason}")
    if not advice:
        lines.append("-> nothing: the fleet fits its work")
    if signals.observed_s < window:
        lines.append(f"(only {signals.observed_s:.0f} s seen so far; these are averages over {window:.0f} s)")
    return lines
