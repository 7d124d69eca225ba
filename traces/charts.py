"""Draws charts of workloads and results: as files, as SVG for a page, or in a terminal.

The same data always give the same bytes.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from traces import TraceError
from traces.describe import PERCENTILES, QUANTITIES, Description
from traces.format import TraceConversation, TraceHeader

try:
    import matplotlib
    from matplotlib.figure import Figure as Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter
except ModuleNotFoundError as missing:
    raise TraceError("charts need matplotlib: pip install 'conserve-llm[reports]'") from missing

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "conserve",
    "text.parse_math": False,
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
COLOURS = ("#1f6f8b", "#d1603d", "#6a994e", "#8e5572", "#b38a00", "#4c566a")
PANEL = (5.2, 3.0)  # inches
POINTS = 400  # most points of a line: a screen shows no more, and they make the page large
LEVELS = " ▁▂▃▄▅▆▇█"
LABEL, WIDTH = 24, 36  # so that a line with numbers on both sides fits 80 columns


def panels(count: int, columns: int = 2) -> tuple[Figure, list[Any]]:
    """Return a figure with `count` empty charts, and these charts."""
    rows = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL[0] * min(columns, count), PANEL[1] * rows), layout="constrained")
        axes = list(figure.subplots(rows, min(columns, count), squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def cdf(axes: Any, series: Mapping[str, Sequence[float]], title: str, unit: str, log: bool = True) -> None:
    """Draw for each series a line with the share of its values that are at or below x."""
    for colour, (name, values) in zip(COLOURS * 4, series.items(), strict=False):
        found = np.sort(np.asarray(values, dtype=float))
        found = found[found > 0.0] if log else found
        if found.size:
            shares = np.linspace(0.0, 1.0, min(found.size, POINTS) + 1)[1:]
            at = np.quantile(found, shares, method="inverted_cdf")
            axes.step(at, shares, where="post", color=colour, label=name)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0.0, 1.02)
    _finish(axes, title, unit, "share", legend=len(series) > 1)


def counts(axes: Any, times: Sequence[float], title: str, bins: int = 60) -> None:
    """Draw how many of `times` fall into each of `bins` equal slices."""
    if times:
        axes.hist(times, bins=min(bins, max(1, len(times))), color=COLOURS[0])
    _finish(axes, title, "s", "per slice", legend=False)


def lines(
    axes: Any,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    title: str,
    x: str,
    y: str,
    steps: bool = False,
) -> None:
    for colour, (name, (across, up)) in zip(COLOURS * 4, series.items(), strict=False):
        style = "steps-post" if steps else "default"
        axes.plot(across, up, color=colour, label=name, linewidth=1.4, drawstyle=style)
    axes.set_ylim(bottom=0.0)
    _finish(axes, title, x, y, legend=len(series) > 1)


def _finish(axes: Any, title: str, x: str, y: str, legend: bool) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, depending on the file's ending."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def to_svg(figure: Figure) -> str:
    """Return an <svg> element without references to anything outside it."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    element = out.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)


def terminal(
    header: TraceHeader, what: Description, conversations: Sequence[TraceConversation]
) -> RenderableType:
    return Group(
        _facts(header, what),
        _percentiles(what),
        _line("arrivals", [c.arrival_s for c in conversations], "s", log=False),
        *(
            _line(q.name, [v for c in conversations for v in q.values(c)], q.unit, log=True)
            for q in QUANTITIES
            if q.name in ("first_turn_input", "later_turn_appended", "turn_output", "wait", "turns")
        ),
    )


def _facts(header: TraceHeader, what: Description) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name in ("source", "licence", "attribution", "notes"):
        if value := getattr(header, name):
            table.add_row(name, value)
    large = what.large_appends
    rows = {
        "conversations": f"{what.conversations:,} ({what.children:,} with a parent), {what.turns:,} turns",
        "tokens": f"{what.prompt_tokens:,} in prompts, {what.cached_share:.1%} of them cached; "
        f"{what.appended_tokens:,} appended; {what.output_tokens:,} out",
        "arrivals": f"{what.rate:.4g}/s over {what.duration_s:,.0f} s, CV of gaps {what.gap_cv:.2f}"
        if what.rate
        else "all at once",
        "endings": ", ".join(f"{name} {count:,}" for name, count in what.endings.items()),
        "models": ", ".join(f"{name} {count:,}" for name, count in what.model_classes.items()),
        "large appends": f"{large.share_of_later_turns:.1%} of later turns, in "
        f"{large.share_of_conversations:.1%} of conversations, "
        f"{large.share_of_later_tokens:.1%} of later tokens",
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _percentiles(what: Description) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))  # 80 columns
    table.add_column("tokens, or as named", no_wrap=True)
    for title in ("mean", *(f"p{percentile}" for percentile in PERCENTILES), "most"):
        table.add_column(title, justify="right", no_wrap=True)
    for quantity in QUANTITIES:
        if quantity.name in what.spreads:
            found = what.spreads[quantity.name]
            values = (found.mean, *found.percentiles, found.most)
            table.add_row(_label(quantity.name, quantity.unit), *map(number, values))
    return table


def number(value: float) -> str:
    """Return a number as text with at most three digits: 0.42, 705, 24.5k, 1.01M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            value, unit = value / size, suffix
            break
    else:
        unit = ""
    return f"{value:.0f}{unit}" if abs(value) >= 99.95 else f"{value:.3g}{unit}"


def _label(name: str, unit: str) -> str:
    words = name.replace("_", " ")
    return words if unit in ("", "tokens") else f"{words}, {unit}"


def _line(name: str, values: Sequence[float], unit: str, log: bool) -> Text:
    """Return a histogram in one line of text. With `log` its axis is logarithmic, as lengths need it."""
    found = np.asarray([value for value in values if value > 0.0 or not log], dtype=float)
    if not found.size or found.min() == found.max():
        return Text(f"{_label(name, unit):<{LABEL}}(no spread)")
    low, high = float(found.min()), float(found.max())
    edges = np.geomspace(low, high, WIDTH + 1) if log else np.linspace(low, high, WIDTH + 1)
    counted, _ = np.histogram(found, edges)
    top = counted.max()
    drawn = "".join(LEVELS[math.ceil(int(count) * (len(LEVELS) - 1) / top)] for count in counted)
    return Text(f"{_label(name, unit):<{LABEL}}{number(low):>8} {drawn} {number(high)}")


def picture(conversations: Sequence[TraceConversation]) -> Figure:
    """Draw arrivals, lengths, waits, and median tokens of the first turns (Figure 1 of the paper)."""
    figure, (arrivals, lengths, shape, waits) = panels(4)
    counts(arrivals, [c.arrival_s for c in conversations], "Arrivals")
    named = {quantity.name: quantity for quantity in QUANTITIES}

    def values(name: str) -> list[float]:
        return [value for c in conversations for value in named[name].values(c)]

    names = ("first_turn_input", "later_turn_appended", "turn_output")
    cdf(lengths, {_label(name, ""): values(name) for name in names}, "Lengths", "tokens")
    cdf(waits, {"wait": values("wait")}, "Waits before later turns", "s")
    first = range(1, 11)
    series = {
        title: (
            list(first),
            [
                _median([getattr(c.turns[n - 1], field) for c in conversations if len(c.turns) >= n])
                for n in first
            ],
        )
        for title, field in (("appended", "appended_tokens"), ("output", "output_tokens"))
    }
    lines(shape, series, "Median tokens of the first ten turns", "turn", "tokens")
    shape.set_yscale("symlog")
    return figure


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else math.nan
