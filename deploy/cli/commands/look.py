"""conserve status, advise, logs, targets: look at a fleet."""

import asyncio
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.common import FleetName, FleetOption, home_of
from deploy.errors import DeployError
from deploy.fleet import FleetSpec, load_fleet
from deploy.home import Purpose
from deploy.lifecycle.status import (
    FleetStatus,
    capacity,
    discovery,
    fleet_status,
    keys_of,
    running,
    write_targets,
)
from deploy.lifecycle.status import targets as pages
from placement.fleet.capacity import Recommendation, Signals
from workers.engine_log import last_lines

app = typer.Typer()
EVERY_S = 10.0


@app.command()
def status(
    fleet: FleetName = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show a fleet's engines: what they do, and the KV they hold."""
    found = fleet_status(home_of(fleet))
    if as_json:
        print(json.dumps(asdict(found), indent=2))
        return
    Console().print(_table(found))
    if line := in_words(found):
        print(line)


def in_words(found: FleetStatus) -> str:
    """What the table does not say; empty where all is well."""
    if found.starting:
        serving = sum(engine.phase == "serving" for engine in found.engines)
        since = f"Starting for {found.seconds:.0f} s" if found.seconds else "Starting"
        return f"{since}: {serving} of {len(found.engines)} engines serve; the endpoint is open when all do."
    if found.lost:
        return f"Its supervisor is gone, and with it Ray; to end what is left: conserve down {found.fleet}"
    if not found.reachable:
        return "The directory does not answer: gateways serve the conversations they know, and no new ones."
    return ""


def _table(found: FleetStatus) -> Table:
    table = Table(title=f"{found.fleet}  {found.endpoint}", title_justify="left", box=None, pad_edge=False)
    if found.starting:
        for column in ("engine", "role", "state"):
            table.add_column(column)
        for engine in found.engines:
            table.add_row(engine.engine, engine.role, engine.in_words)
        return table
    for column in ("engine", "role", "pid", "KV", "parked", "runs", "conversations", "starts", "state"):
        left = column in ("engine", "role", "state")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "state")
    for engine in found.engines:
        used = f"{engine.live_tokens / engine.kv_tokens:.0%}" if engine.kv_tokens else ""
        table.add_row(
            *(engine.engine, engine.role, str(engine.pid or ""), used, str(engine.parked_tokens)),
            *(str(engine.running), str(engine.conversations), str(engine.restarts + 1)),
            engine.in_words,
        )
    return table


@app.command()
def advise(
    fleet: FleetName = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say whether the fleet has too few engines or more than it needs, with the numbers behind it."""
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
        + ("" if signals.lent is None else f"; decoders lend prompts {signals.lent:.1f} engines' time"),
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


@app.command()
def logs(
    engine: Annotated[str, typer.Argument(help="an engine or a gateway, as decode-0 or gateway-0")],
    fleet: FleetOption = None,
    lines: Annotated[int, typer.Option(help="how many")] = 50,
) -> None:
    """Print the end of an engine's or a gateway's log."""
    home = home_of(fleet)
    known = sorted(path for path in (*home.engines.glob("*"), *home.gateways.glob("*")) if path.is_dir())
    for directory in known:
        if directory.name == engine:
            print("\n".join(last_lines(directory / "log", lines)))
            return
    names = ", ".join(path.name for path in known) or "none: was the fleet ever up?"
    raise DeployError(f"no engine '{engine}' in fleet '{home.name}'; there are: {names}")


@app.command()
def targets(
    fleet: FleetName = None,
    out: Annotated[Path | None, typer.Option(help="write there, for file_sd_configs")] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="answer http_sd_configs there, until ended")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="write again every 10 s: engines move")] = False,
) -> None:
    """Print, keep or serve the list of metric pages, for Prometheus' file or HTTP discovery."""
    home = home_of(fleet)
    if serve is not None:
        with discovery(serve, lambda: pages(fleet_status(home))) as server:
            print(
                f"http_sd_configs: [{{url: http://{server.server_name}:{server.server_port}/}}]", flush=True
            )
            server.serve_forever()
    while True:
        found = pages(fleet_status(home))
        if out is None:
            print(json.dumps(found, indent=1))
        else:
            write_targets(out, found)
        if not watch:
            return
        time.sleep(EVERY_S)
