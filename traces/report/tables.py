"""The rows of a report, the same for the terminal and the page. What was not measured is a blank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces.replay.results import Replay
from traces.replay.summary import Summary, summarise

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
    "transfer",
    "recomput",
    "redisagg",
    "park",
    "restore",
    "refus",
    "prefix_cache",
    "preempt",
    "joules",
)


@dataclass(frozen=True, slots=True)
class Table:
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
    """The last against the first, where there are two."""
    if len(values) < 2:
        return ()
    first, last = values[0], values[-1]
    return (f"{last / first - 1.0:+.1%}",) if first and last is not None else ("",)


def tables(runs: Sequence[Replay]) -> list[Table]:
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


def _latencies(labels: tuple[str, ...], summaries: Sequence[Summary]) -> Table:
    rows = []
    for name, title in LATENCIES.items():
        spreads = [summary.spreads.get(name) for summary in summaries]
        if not any(spreads):
            continue
        for percentile in SHOWN:
            values = [found.at(percentile) if found else None for found in spreads]
            label = f"{title}, p{percentile}"
            rows.append((label, *map(seconds, values), *_change(values)))
    return Table("Latencies", ("", *_heads(labels)), tuple(rows), _censored(labels, summaries))


def _censored(labels: tuple[str, ...], summaries: Sequence[Summary]) -> str:
    """Who did not get through is missing from the percentiles: a reader must know before comparing."""
    parts = []
    for label, summary in zip(labels, summaries, strict=True):
        every, done = sum(summary.outcomes.values()), summary.outcomes["done"]
        if done < every:
            parts.append(
                f"{label}: {every - done} of {every} conversations not done, their missing times not counted."
            )
    return " ".join(parts)


def _objectives(runs: Sequence[Replay], labels: tuple[str, ...], summaries: Sequence[Summary]) -> Table:
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
    return Table("Objectives", ("", *labels), tuple(rows), note)


def _work(labels: tuple[str, ...], summaries: Sequence[Summary], runs: Sequence[Replay]) -> Table:
    figures: dict[str, Callable[[Summary], float | None]] = {
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
    return Table("Work", ("", *_heads(labels)), tuple(rows))


def _counters(labels: tuple[str, ...], runs: Sequence[Replay]) -> Table:
    names = sorted({name for run in runs for name in run.meters.counters})
    shown = [name for name in names if not name.endswith("_count")]  # how often a histogram was fed
    chosen = [name for name in shown if any(part in name for part in COUNTERS)]
    rows = tuple((name, *(count(run.meters.counters.get(name)) for run in runs)) for name in chosen)
    unread = sorted({page for run in runs for page in run.meters.unread})
    note = f"Not read: {'; '.join(unread)}" if unread else ""
    return Table("Counters of the fleet", ("", *labels), rows, note)


def _errors(labels: tuple[str, ...], summaries: Sequence[Summary]) -> Table:
    kinds = dict.fromkeys(kind for summary in summaries for kind in summary.errors)
    rows = tuple((kind, *(count(summary.errors.get(kind, 0)) for summary in summaries)) for kind in kinds)
    return Table("Errors", ("", *labels), rows)
