"""python -m deploy.observe.render DASHBOARD --out FILE.png: draw a dashboard's panels from a live Prometheus.

For a report, or a look without Grafana: the titles, expressions and units are those of `deploy/grafana/`.
"""

import argparse
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.observe.panels import DASHBOARDS, Panel

STEPS = 240  # points across a panel
RATE_SCRAPES = 4  # Grafana's $__rate_interval is at least so many scrapes
UNITS = {"s": "s", "percentunit": "%", "Bps": "MB/s", "watt": "W", "joule": "J", "short": ""}
FACTORS = {"percentunit": 100.0, "Bps": 1e-6}
LIMIT_S = 30.0
INK, FAINT, GRID = "#1d2126", "#6d747c", "#e6e2d9"
COLOURS = ("#2f6f8f", "#b5533c", "#c9a44a", "#9a8fb5", "#3c7a4e", "#8fb8cc", "#6d747c")


@dataclass(frozen=True, slots=True)
class Series:
    legend: str
    at: tuple[datetime, ...]
    values: tuple[float, ...]


def series_of(panel: Panel, prometheus: str, begin: float, end: float, rate_s: float) -> list[Series]:
    found = []
    for legend, expression in panel.lines:
        query = {
            "query": expression.replace("$__rate_interval", f"{rate_s:.0f}s"),
            "start": f"{begin:.3f}",
            "end": f"{end:.3f}",
            "step": f"{max(1.0, (end - begin) / STEPS):.3f}",
        }
        url = f"{prometheus.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            results = json.load(answer)["data"]["result"]
        found += [_series(legend, result, FACTORS.get(panel.unit, 1.0)) for result in results]
    return _worth_drawing([one for one in found if any(not math.isnan(value) for value in one.values)])


def _worth_drawing(found: list[Series]) -> list[Series]:
    """Of many causes those that occurred: a legend of eighteen zeros hides the one that matters."""
    if len(found) <= len(COLOURS):
        return found
    return [series for series in found if any(series.values)] or found[:1]


def _series(legend: str, result: dict[str, Any], factor: float) -> Series:
    for label, value in result["metric"].items():
        legend = legend.replace(f"{{{{{label}}}}}", value)
    at = tuple(datetime.fromtimestamp(float(when), UTC) for when, _ in result["values"])
    return Series(legend, at, tuple(float(value) * factor for _, value in result["values"]))


def draw(
    title: str, panels: Sequence[tuple[Panel, list[Series]]], out: Path, columns: int = 2, dpi: int = 100
) -> None:
    import matplotlib as mpl  # heavy, and only drawing needs it

    mpl.use("Agg")
    import matplotlib.dates as dates
    import matplotlib.pyplot as plt

    rows = math.ceil(len(panels) / columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6.2 * columns, 2.6 * rows + 0.5), squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, lines) in zip(grid.flat, panels, strict=False):
        unit = UNITS.get(panel.unit, panel.unit)
        axes.set_title(f"{panel.title}{f' ({unit})' if unit else ''}", loc="left", fontsize=10, color=INK)
        for line, colour in zip(lines, COLOURS * (1 + len(lines) // len(COLOURS)), strict=False):
            axes.plot(line.at, line.values, label=line.legend, color=colour, linewidth=1.4)
        if lines:
            axes.set_ylim(bottom=0)
            axes.legend(
                fontsize=7,
                frameon=False,
                ncols=3,
                loc="upper left",
                bbox_to_anchor=(-0.02, -0.12),
                labelcolor=INK,
            )
            axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=5, maxticks=9))
            axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
        else:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color=FAINT, transform=axes.transAxes)
            axes.set_xticks([])
            axes.set_yticks([])
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.tick_params(labelsize=8, colors=FAINT, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.99), h_pad=1.6)
    figure.savefig(out, dpi=dpi, facecolor="#ffffff")
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.observe.render", description=__doc__)
    by_name = {dashboard.name: dashboard for dashboard in DASHBOARDS}
    parser.add_argument("dashboard", choices=sorted(by_name))
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="its address")
    parser.add_argument("--out", type=Path, required=True, help="a PNG, SVG or PDF file")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--scrape-s", type=float, default=5.0, help="the scrape interval")
    parser.add_argument("--panel", action="append", help="a title; several times; default: all")
    options = parser.parse_args(arguments)
    dashboard = by_name[options.dashboard]
    chosen = [panel for panel in dashboard.panels if not options.panel or panel.title in options.panel]
    if not chosen:
        titles = ", ".join(panel.title for panel in dashboard.panels)
        parser.error(f"no such panel; there are: {titles}")
    now = time.time()
    begin, rate_s = now - 60 * options.minutes, RATE_SCRAPES * options.scrape_s
    try:
        panels = [(panel, series_of(panel, options.prometheus, begin, now, rate_s)) for panel in chosen]
    except urllib.error.URLError as wrong:
        print(f"no answer from Prometheus at {options.prometheus}: {wrong.reason}", file=sys.stderr)
        return 1
    draw(dashboard.title, panels, options.out)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
