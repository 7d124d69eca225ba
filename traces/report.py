"""Shows the results of one replay, or of several side by side, in a terminal or as one HTML page."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from traces import charts
from traces.charts import Figure
from traces.replay.results import Replay, ReplaySummary, summarise

LATENCIES = {
    "ttfet": "TTFET",
    "ttfet_served": "TTFET, tools left out",
    "last_turn_tbt": "last-turn TBT",
    "e2e": "E2E",
    "e2e_served": "E2E, tools left out",
    "ttft_first_turn": "TTFT of first turns",
    "ttft_later_turns": "TTFT of later turns",
    "ttft": "TTFT of all turns",
    "tbt": "TBT of all turns",
    "longest_gap": "longest gap in an answer",
}
SHOWN = (50, 90, 95, 99)
COUNTERS = (
    *("transfer", "recomput", "redisagg", "park", "restore"),
    *("refus", "prefix_cache", "preempt", "joules"),
)


@dataclass(frozen=True, slots=True)
class ReportTable:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    if abs(value) < 1.0:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s" if abs(value) < 100.0 else f"{value:,.0f} s"


def count(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def share(value: float) -> str:
    return f"{value:.1%}"


def _change(values: Sequence[float | None]) -> tuple[str, ...]:
    """Return a cell with the change from the first to the last value, or none for a single value."""
    if len(values) < 2:
        return ()
    first, last = values[0], values[-1]
    return (f"{last / first - 1.0:+.1%}",) if first and last is not None else ("",)


def tables(runs: Sequence[Replay]) -> list[ReportTable]:
    summaries = [summarise(run) for run in runs]
    labels = tuple(run.label for run in runs)
    found = [
        _latencies(labels, summaries),
        _objectives(runs, labels, summaries),
        _work(labels, summaries, runs),
        _counters(labels, runs),
        _errors(labels, summaries),
    ]
    return [table for table in found if table.rows]


def _heads(labels: tuple[str, ...]) -> tuple[str, ...]:
    return (*labels, "change") if len(labels) > 1 else labels


def _latencies(labels: tuple[str, ...], summaries: Sequence[ReplaySummary]) -> ReportTable:
    rows = []
    for name, title in LATENCIES.items():
        spreads = [summary.spreads.get(name) for summary in summaries]
        if not any(spreads):
            continue
        for percentile in SHOWN:
            values = [found.at(percentile) if found else None for found in spreads]
            label = f"{title}, p{percentile}"
            rows.append((label, *map(seconds, values), *_change(values)))
    return ReportTable("Latencies", ("", *_heads(labels)), tuple(rows), _censored(labels, summaries))


def _censored(labels: tuple[str, ...], summaries: Sequence[ReplaySummary]) -> str:
    """Return a note about conversations that are missing from the percentiles because they did not end."""
    parts = []
    for label, summary in zip(labels, summaries, strict=True):
        every, done = sum(summary.outcomes.values()), summary.outcomes["done"]
        if done < every:
            parts.append(
                f"{label}: {every - done} of {every} conversations not done, their missing times not counted."
            )
    return " ".join(parts)


def _objectives(
    runs: Sequence[Replay], labels: tuple[str, ...], summaries: Sequence[ReplaySummary]
) -> ReportTable:
    rows = []
    for name in ("ttfet", "last_turn_tbt", "e2e"):
        found = [summary.objectives.get(name) for summary in summaries]
        if not any(found):
            continue
        title = LATENCIES[name]
        violated = [o.violation_share if o else None for o in found]
        rows.append((f"{title}: violations", *(share(v) if v is not None else "" for v in violated)))
        means = [f"{o.geometric_mean:.2f} x" if o else "" for o in found]
        tails = [f"{o.p95:.2f} x" if o else "" for o in found]
        rows.append((f"{title}: geometric mean of measured / unloaded", *means))
        rows.append((f"{title}: p95 of measured / unloaded", *tails))
    factor = " and ".join(dict.fromkeys(f"{run.slo_factor:g}" for run in runs))
    note = (
        f"Violated above {factor} times the unloaded latency of the same conversation, tools left out; "
        f"unloaded latencies from probes played alone before the run."
    )
    return ReportTable("Objectives", ("", *labels), tuple(rows), note)


def _work(labels: tuple[str, ...], summaries: Sequence[ReplaySummary], runs: Sequence[Replay]) -> ReportTable:
    figures: dict[str, Callable[[ReplaySummary], float | None]] = {
        "conversations done": lambda s: s.outcomes["done"],
        "failed": lambda s: s.outcomes["failed"],
        "unfinished": lambda s: s.outcomes["unfinished"],
        "not started": lambda s: s.outcomes["not_started"],
        "refusals (429, 503)": lambda s: s.refusals,
        "late starts": lambda s: s.late_starts,
        "turns": lambda s: s.turns,
        "prompt tokens": lambda s: s.prompt_tokens,
        "new prompt tokens": lambda s: s.new_tokens,
        "cached, by the endpoint": lambda s: s.reported_cached_tokens,
        "recomputed, by the endpoint": lambda s: s.recomputed_tokens,
        "output tokens": lambda s: s.output_tokens,
        "output tokens/s": lambda s: s.output_tokens_per_s,
        "conversations/s": lambda s: s.conversations_per_s,
        "output tokens/J": lambda s: s.output_tokens_per_joule,
        "new and output tokens/J": lambda s: s.tokens_per_joule,
    }
    rows = [("duration", *(seconds(run.duration_s) for run in runs), *_change([r.duration_s for r in runs]))]
    for title, figure in figures.items():
        values = [figure(summary) for summary in summaries]
        if any(value is not None for value in values):
            rows.append((title, *map(count, values), *_change(values)))
    return ReportTable("Work", ("", *_heads(labels)), tuple(rows))


def _counters(labels: tuple[str, ...], runs: Sequence[Replay]) -> ReportTable:
    names = sorted({name for run in runs for name in run.meters.counters})
    shown = [name for name in names if not name.endswith("_count")]  # number of values of a histogram
    chosen = [name for name in shown if any(part in name for part in COUNTERS)]
    rows = tuple((name, *(count(run.meters.counters.get(name)) for run in runs)) for name in chosen)
    unread = sorted({page for run in runs for page in run.meters.unread})
    note = f"Not read: {'; '.join(unread)}" if unread else ""
    return ReportTable("Counters of the fleet", ("", *labels), rows, note)


def _errors(labels: tuple[str, ...], summaries: Sequence[ReplaySummary]) -> ReportTable:
    kinds = dict.fromkeys(kind for summary in summaries for kind in summary.errors)
    rows = tuple((kind, *(count(summary.errors.get(kind, 0)) for summary in summaries)) for kind in kinds)
    return ReportTable("Errors", ("", *labels), rows)


SLICES = 120


def latency_charts(runs: Sequence[Replay]) -> Figure:
    figure, (ttfet, tbt, e2e, ttft) = charts.panels(4)
    charts.cdf(ttfet, _each(runs, "served_ttfet_s"), "TTFET, tools left out", "s")
    charts.cdf(tbt, _each(runs, "last_turn_tbt_s"), "Last-turn TBT", "s")
    charts.cdf(e2e, _each(runs, "served_e2e_s"), "E2E, tools left out", "s")
    turns = {
        f"{run.label}, {which}": [t.ttft_s for r in run.conversations for t in r.turns[part]]
        for run in runs
        for which, part in (("first turns", slice(0, 1)), ("later turns", slice(1, None)))
    }
    charts.cdf(ttft, turns, "TTFT", "s")
    return figure


def charts_over_time(runs: Sequence[Replay]) -> Figure:
    figure, (live, tokens) = charts.panels(2)
    charts.lines(
        live, {run.label: in_flight_over_time(run) for run in runs}, "Conversations in flight", "s", "", True
    )
    charts.lines(
        tokens, {run.label: tokens_over_time(run) for run in runs}, "Output tokens per second", "s", ""
    )
    return figure


def _each(runs: Sequence[Replay], name: str) -> dict[str, list[float]]:
    return {
        run.label: [value for r in run.conversations if (value := getattr(r, name)) is not None]
        for run in runs
    }


def in_flight_over_time(run: Replay) -> tuple[list[float], list[float]]:
    begun = [(r.started_s, 1) for r in run.conversations if r.turns]
    ended = [(r.turns[-1].answered_s, -1) for r in run.conversations if r.turns]
    now, times, counts = 0, [0.0], [0.0]
    for at, step in sorted(begun + ended):
        now += step
        times.append(at)
        counts.append(float(now))
    return times, counts


def tokens_over_time(run: Replay) -> tuple[list[float], list[float]]:
    """Return times and tokens per second. An answer's tokens are spread evenly over its stream."""
    edges = np.linspace(0.0, max(run.duration_s, 1e-9), SLICES + 1)
    done = np.zeros_like(edges)
    for result in run.conversations:
        for turn in result.turns:
            start = turn.asked_s + turn.ttft_s
            length = max(turn.answered_s - start, 1e-9)
            done += turn.output_tokens * np.clip((edges - start) / length, 0.0, 1.0)
    rates = np.diff(done) / np.diff(edges)
    return [float(x) for x in (edges[1:] + edges[:-1]) / 2.0], [float(x) for x in rates]


def terminal(runs: Sequence[Replay]) -> RenderableType:
    return Group(*(part for table in tables(runs) for part in _parts(table)))


def _parts(table: ReportTable) -> list[RenderableType]:
    drawn = RichTable(title=Text(table.title), title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="right" if index and column else "left")
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    parts: list[RenderableType] = [drawn]
    if table.note:
        parts.append(Text(table.note, style="dim"))
    parts.append(Text(""))
    return parts


STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } pre { overflow-x: auto; line-height: 1.35; }
figure { margin: 1rem 0; background: #fff; padding: .5rem; } figure svg { width: 100%; height: auto; }
"""
PAGE_COLUMNS = 160  # width of tables on the page; a narrower window scrolls sideways


def page(runs: Sequence[Replay]) -> str:
    title = escape("Replay: " + " against ".join(run.label for run in runs))
    figures = (charts.to_svg(figure) for figure in (latency_charts(runs), charts_over_time(runs)))
    drawn = "".join(f"<figure>{figure}</figure>" for figure in figures)
    facts = Group(*(part for run in runs for part in _parts(_facts(run))))
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>"
    )
    body = f"<h1>{title}</h1>{_html(facts)}{drawn}{_html(terminal(runs))}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _html(shown: RenderableType) -> str:
    """Return the HTML of what a terminal would show."""
    console = Console(width=PAGE_COLUMNS, record=True, file=io.StringIO())
    console.print(shown)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _facts(run: Replay) -> ReportTable:
    facts = {
        "trace": run.trace,
        "endpoint": run.url,
        "model": run.model,
        "duration": seconds(run.duration_s),
        "text": f"{run.chars_per_token:.2f} characters a token, by {run.calibrated_by}",
    }
    if alone := run.unloaded:
        facts["unloaded"] = (
            f"TTFT {seconds(alone.fixed_s)} + {alone.per_token_s * 1e6:.3g} µs a new token, "
            f"TBT {seconds(alone.step_s)}; {alone.probes} probes, "
            f"mean error {alone.ttft_error:.1%} and {alone.tbt_error:.1%}"
        )
    facts["options"] = ", ".join(f"{name} {value}" for name, value in run.options.items() if value != "")
    return ReportTable(run.label, ("", ""), tuple(fact for fact in facts.items() if fact[1]))
