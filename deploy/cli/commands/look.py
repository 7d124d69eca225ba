"""conserve status, advise, logs, targets, top: look at a fleet."""

import asyncio
import json
import math
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

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
    serving,
    trust_of,
    write_targets,
)
from deploy.lifecycle.status import targets as pages
from placement.sizing.capacity import Recommendation, Signals
from workers.keeper.engine_log import last_lines

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


# `conserve top`: the dashboard in the terminal, from one answer of the gateway's /dashboard/state.

BAR = 30
TIMELINE = 48
WINDOW_S = 120.0
SPANS = {  # a glyph of its own each: colours may be missing
    "prefill": ("█", "red"),
    "wait": ("░", "yellow"),
    "decode": ("▆", "cyan"),
    "tool": ("·", "bright_black"),
    "idle": ("─", "bright_black"),
    "parked": ("▒", "magenta"),
}
NOTHING = (" ", "none")  # before it began
OBJECTIVES = {"ttfet": "begin within", "last_turn_tbt": "a token every", "e2e": "end within"}


def render(state: dict[str, Any], timelines: int) -> RenderableType:
    return Group(_summary(state), Text(), _engines(state["engines"]), Text(), *_timelines(state, timelines))


def _summary(state: dict[str, Any]) -> Text:
    text = Text(state["fleet"], style="bold")
    text.append(f"   {state['live']} conversations", style="none")
    text.append(f"   {state['turns_running']} turns running", style="none")
    text.append(f"   {state['decoder_kv']:.0%} of decoder KV in use", style="none")
    if state["slo"]:
        text.append("\nanswers ", style="bright_black")
    for objective in state["slo"]:
        style = "green" if objective["attained"] >= 0.99 else "red"
        text.append(f"  {objective['attained']:.1%}", style=style)
        words = OBJECTIVES[objective["objective"]]
        text.append(f" {words} {duration(objective['target_s'])}", style="bright_black")
    if state["notice"]:
        text.append(f"\n{state['notice']}", style="red")
    return text


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "role", "KV: live, reserved, offline"):
        table.add_column(heading)
    for heading in ("of", "parked", "host", "running", "waiting", "offline"):
        table.add_column(heading, justify="right")
    for engine in engines:
        kv = engine["kv"]
        role = engine["role"] if engine["status"] == "up" else engine["status"]
        table.add_row(
            Text(engine["engine"]),
            Text(role, style="none" if engine["status"] == "up" else "red"),
            kv_bar(kv),
            tokens(kv["capacity"]),
            tokens(kv["parked"]),
            f"{kv['host_used'] / kv['host_capacity']:.0%}" if kv["host_capacity"] else "–",
            str(engine["running"]),
            str(engine["waiting"]),
            str(engine["offline_running"]),
        )
    return table


def kv_bar(kv: dict[str, int]) -> Text:
    bar, drawn = Text(), 0
    for kind, style in (("live", "cyan"), ("reserved", "blue"), ("offline", "magenta")):
        share = kv[kind] / kv["capacity"] if kv["capacity"] else 0.0
        width = min(round(share * BAR), BAR - drawn)
        bar.append("█" * width, style=style)
        drawn += width
    bar.append("░" * (BAR - drawn), style="bright_black")
    return bar


def _timelines(state: dict[str, Any], count: int) -> list[Text]:
    if not state["timelines"]:
        return [Text("no conversation in the last two minutes", style="bright_black")]
    newest = sorted(state["timelines"][:count], key=lambda timeline: timeline["started"], reverse=True)
    return [_legend(), *(_timeline(timeline, state["now"]) for timeline in newest)]


def _legend() -> Text:
    text = Text(f"{'the last two minutes':34}  ", style="bright_black")
    for kind, (glyph, style) in SPANS.items():
        text.append(glyph * 2, style=style)
        text.append(f" {kind}  ")
    return text


def _timeline(timeline: dict[str, Any], now: float) -> Text:
    name = timeline["key"].partition(":")[2] or timeline["key"]
    text = Text(f"{name[:20]:20}  {timeline['engine'][:12]:12}  ")
    for glyph, style in cells(timeline["spans"], now):
        text.append(glyph, style=style)
    turns = "1 turn" if timeline["turns"] == 1 else f"{timeline['turns']} turns"
    text.append(f"  {timeline['ended'] or turns}")
    return text


def cells(spans: list[list[Any]], now: float) -> list[tuple[str, str]]:
    """Glyph and style of each cell of time, the latest right: those of the span that holds the cell's end."""
    found = []
    for cell in range(1, TIMELINE + 1):
        at = now - WINDOW_S * (1 - cell / TIMELINE)
        kind = next((kind for kind, begin in reversed(spans) if begin <= at), None)
        found.append(NOTHING if kind is None else SPANS[kind])
    return found


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:g} s"


def tokens(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 10_000 else str(count)


TIMEOUT_S = 5.0
PATIENCE = 10  # answers missed in a row before giving up


@app.command()
def top(
    fleet: FleetName = None,
    url: Annotated[str, typer.Option(help="A gateway; else that of the fleet.")] = "",
    key: Annotated[
        str, typer.Option(envvar="CONSERVE_ADMIN_KEY", help="Of scope admin; else the fleet's first.")
    ] = "",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
) -> None:
    """Engines and conversations as they move. Ctrl-C ends it."""
    console, trust = Console(), None
    if not url:
        home = home_of(fleet)
        url, up = serving(home).endpoint, load_fleet(home.fleet_file)
        key, trust = key or next(iter(up.gateway.admin_keys), ""), trust_of(up)
    state = look(url, key, trust)
    if once:
        console.print(render(state, timelines=20))
        return
    missed = 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                timelines = max(3, console.height - 10 - len(state["engines"]))
                live.update(render(state, timelines), refresh=True)
                time.sleep(every)
                try:
                    state, missed = look(url, key, trust), 0
                except DeployError as wrong:
                    missed += 1
                    if missed >= PATIENCE:
                        raise
                    state = {**state, "notice": str(wrong)}
        except KeyboardInterrupt:
            return


def look(url: str, key: str, trust: ssl.SSLContext | None = None) -> dict[str, Any]:
    request = urllib.request.Request(f"{url.rstrip('/')}/dashboard/state")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as answer:
            state: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as wrong:
        hint = "; pass --key with one that has the scope admin" if wrong.code in (401, 403) else ""
        raise DeployError(f"{url} answered {wrong.code}{hint}") from wrong
    except (OSError, ValueError) as wrong:
        raise DeployError(f"no gateway answers at {url}: {wrong}; is the fleet up?") from wrong
    return state
