"""conserve advise: say whether the fleet has the right number of engines."""

import asyncio
import json
import math
from dataclasses import asdict
from typing import Any

from deploy.cli.common import AsJson, FleetName, home_of
from deploy.errors import DeployError
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import Purpose
from deploy.lifecycle.status import capacity, keys_of, running
from placement.sizing.capacity import Recommendation, Signals


def advise(
    fleet: FleetName = None,
    as_json: AsJson = False,
) -> None:
    """Say whether the fleet has too few or too many engines, and show the loads behind that advice."""
    home = home_of(fleet)
    run, shape = running(home), load_fleet(home.fleet_file)
    answer = asyncio.run(capacity(run.directory, keys_of(shape, home).of(Purpose.DIRECTORY)))
    if answer is None:
        raise DeployError(f"the directory of '{home.name}' does not answer: see conserve status")
    signals, advice = answer.signals, answer.advice
    if as_json:
        print(json.dumps(as_data(signals, advice, shape), indent=2))
        return
    print("\n".join(sentences(signals, advice, shape)))


def as_data(signals: Signals, advice: tuple[Recommendation, ...], fleet: FleetSpec) -> dict[str, Any]:
    saturates_in_s = signals.saturates_in_s(fleet.conversation.prefiller_wait)
    finite = {name: value if math.isfinite(value) else None for name, value in asdict(signals).items()}
    return {
        "signals": {**finite, "saturates_in_s": saturates_in_s if math.isfinite(saturates_in_s) else None},
        "window_s": fleet.capacity.window,
        "advice": [asdict(one) for one in advice],
    }


def sentences(signals: Signals, advice: tuple[Recommendation, ...], fleet: FleetSpec) -> list[str]:
    window = fleet.capacity.window
    lines = [
        f"prefillers: {signals.prefillers} up, {signals.prefill_load:.0%} of their time asked for, "
        f"shortest queue {signals.prefill_wait_s:.1f} s"
        + ("" if signals.lent is None else f"; decoders have {signals.lent:.1f} engines' time for prompts")
        + (f"; {signals.taking} idle ones take conversations" if signals.taking else ""),
        f"decoders:   {signals.decoders} up, {signals.decoder_pressure:.0%} of their KV in use, "
        f"{signals.running_share:.0%} by running turns",
    ]
    for one in advice:
        count = f" {one.count}" if one.count else ""
        lines.append(f"-> {one.action.value.replace('_', ' ')}{count}: {one.reason}")
    if not advice:
        lines.append("-> change nothing: the fleet fits its load")
    if signals.observed_s < window:
        lines.append(
            f"(only {signals.observed_s:.0f} s observed so far; these are averages over {window:.0f} s)"
        )
    return lines
