"""The charts of a report."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from traces import charts
from traces.replay.results import Replay

SLICES = 120


def latencies(runs: Sequence[Replay]) -> Figure:
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


def over_time(runs: Sequence[Replay]) -> Figure:
    figure, (live, tokens) = charts.panels(2)
    charts.lines(live, {run.label: _live(run) for run in runs}, "Conversations in flight", "s", "", True)
    charts.lines(tokens, {run.label: _tokens(run) for run in runs}, "Output tokens per second", "s", "")
    return figure


def _each(runs: Sequence[Replay], name: str) -> dict[str, list[float]]:
    return {
        run.label: [value for r in run.conversations if (value := getattr(r, name)) is not None]
        for run in runs
    }


def _live(run: Replay) -> tuple[list[float], list[float]]:
    begun = [(r.started_s, 1) for r in run.conversations if r.turns]
    ended = [(r.turns[-1].answered_s, -1) for r in run.conversations if r.turns]
    now, times, counts = 0, [0.0], [0.0]
    for at, step in sorted(begun + ended):
        now += step
        times.append(at)
        counts.append(float(now))
    return times, counts


def _tokens(run: Replay) -> tuple[list[float], list[float]]:
    """An answer's tokens are spread evenly over the time it was streamed."""
    edges = np.linspace(0.0, max(run.duration_s, 1e-9), SLICES + 1)
    done = np.zeros_like(edges)
    for result in run.conversations:
        for turn in result.turns:
            start = turn.asked_s + turn.ttft_s
            length = max(turn.answered_s - start, 1e-9)
            done += turn.output_tokens * np.clip((edges - start) / length, 0.0, 1.0)
    rates = np.diff(done) / np.diff(edges)
    return [float(x) for x in (edges[1:] + edges[:-1]) / 2.0], [float(x) for x in rates]
