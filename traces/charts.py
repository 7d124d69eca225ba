"""Charts of workloads and results, as files or as SVG to put into a page. Same data, same bytes."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

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
POINTS = 400  # of a line: more than a screen shows would only make the page large


def panels(count: int, columns: int = 2) -> tuple[Figure, list[Any]]:
    """A figure of `count` empty charts."""
    rows = -(-count // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PANEL[0] * min(columns, count), PANEL[1] * rows), layout="constrained")
        axes = list(figure.subplots(rows, min(columns, count), squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def cdf(axes: Any, series: Mapping[str, Sequence[float]], title: str, unit: str, log: bool = True) -> None:
    """Share of cases at or below a value, one line a series."""
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
    """How many of `times` fall into each slice."""
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
    """PNG, SVG or PDF by the file's ending."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def to_svg(figure: Figure) -> str:
    """An <svg> element that refers to nothing outside itself."""
    out = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    element = out.getvalue()
    element = element[element.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
