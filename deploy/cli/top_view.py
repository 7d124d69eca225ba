"""What `conserve top` shows, from one answer of the gateway's /dashboard/state."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BAR = 30
LANE = 48
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


def render(state: dict[str, Any], lanes: int) -> RenderableType:
    return Group(_summary(state), Text(), _engines(state["engines"]), Text(), *_lanes(state, lanes))


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
        promise = OBJECTIVES[objective["objective"]]
        text.append(f" {promise} {duration(objective['target_s'])}", style="bright_black")
    if state["notice"]:
        text.append(f"\n{state['notice']}", style="red")
    return text


def _engines(engines: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for heading in ("engine", "role", "KV: live, promised, offline"):
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


def _lanes(state: dict[str, Any], count: int) -> list[Text]:
    if not state["lanes"]:
        return [Text("no conversation in the last two minutes", style="bright_black")]
    newest = sorted(state["lanes"][:count], key=lambda lane: lane["started"], reverse=True)
    return [_legend(), *(_lane(lane, state["now"]) for lane in newest)]


def _legend() -> Text:
    text = Text(f"{'the last two minutes':34}  ", style="bright_black")
    for kind, (glyph, style) in SPANS.items():
        text.append(glyph * 2, style=style)
        text.append(f" {kind}  ")
    return text


def _lane(lane: dict[str, Any], now: float) -> Text:
    name = lane["key"].partition(":")[2] or lane["key"]
    text = Text(f"{name[:20]:20}  {lane['engine'][:12]:12}  ")
    for glyph, style in cells(lane["spans"], now):
        text.append(glyph, style=style)
    turns = "1 turn" if lane["turns"] == 1 else f"{lane['turns']} turns"
    text.append(f"  {lane['ended'] or turns}")
    return text


def cells(spans: list[list[Any]], now: float) -> list[tuple[str, str]]:
    """Glyph and style of each cell of time, the latest right: those of the span that holds the cell's end."""
    found = []
    for cell in range(1, LANE + 1):
        at = now - WINDOW_S * (1 - cell / LANE)
        kind = next((kind for kind, begin in reversed(spans) if begin <= at), None)
        found.append(NOTHING if kind is None else SPANS[kind])
    return found


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:g} s"


def tokens(count: int) -> str:
    return f"{count / 1000:.0f}k" if count >= 10_000 else str(count)
