"""conserve top: show the dashboard in the terminal, from the gateway's /dashboard/state."""

import json
import ssl
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.cli.common import FleetName, gateway_of
from deploy.errors import DeployError
from deploy.lifecycle.endpoint import trust_of

BAR = 30
TIMELINE = 48
WINDOW_S = 120.0
SPANS = {  # the glyphs differ, because a terminal may show no colours
    "prefill": ("█", "red"),
    "wait": ("░", "yellow"),
    "decode": ("▆", "cyan"),
    "tool": ("·", "bright_black"),
    "idle": ("─", "bright_black"),
    "parked": ("▒", "magenta"),
}
NOTHING = (" ", "none")  # before the conversation began
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
    """Return the glyph and style of each cell of a conversation's timeline, newest last.

    A cell shows the span that lasts at the cell's end.
    """
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
MAX_MISSED = 10  # answers missed in a row before giving up


def top(
    fleet: FleetName = None,
    url: Annotated[str, typer.Option(help="Address of a gateway; by default that of the fleet")] = "",
    key: Annotated[
        str,
        typer.Option(envvar="CONSERVE_ADMIN_KEY", help="Key of scope admin; by default the fleet's first"),
    ] = "",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print once and end")] = False,
) -> None:
    """Show engines and conversations live, until Ctrl-C."""
    console, trust = Console(), None
    if not url:
        url, up = gateway_of(fleet)
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
                    if missed >= MAX_MISSED:
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
