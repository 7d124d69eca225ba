"""Figures 10 to 13, drawn."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from benchmarks.paper import a40
from benchmarks.paper.experiment import PaperFigures
from traces import charts

METRICS = {"ttfet": "TTFET", "last_tbt": "last-turn TBT", "e2e": "E2E"}
SHOWN = ("prefiller", "ampd", "collocated", "full_disaggregation")


def draw(figures: PaperFigures, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_figure_10(figures, folder), _figure_11(figures, folder)]
    return [*drawn, _figure_12(figures, folder), _figure_13(figures, folder)]


def _figure_10(figures: PaperFigures, folder: Path) -> Path:
    figure, every = charts.panels(9, columns=3)
    axes = [every[row : row + 3] for row in (0, 3, 6)]
    for column, (metric, title) in enumerate(METRICS.items()):
        for system in SHOWN:
            runs = sorted(figures.of(system), key=lambda run: run.rate)
            rates = [run.rate for run in runs]
            for row, field in enumerate(("gmean", "p95", "violations")):
                values = [getattr(getattr(run, metric), field) for run in runs]
                axes[row][column].plot(rates, values, marker="o", label=system)
        axes[0][column].set_title(title)
        for row in (0, 1) if metric != "last_tbt" else ():
            axes[row][column].set_yscale("log")
        axes[2][column].set_xlabel("conversations/s")
        axes[2][column].set_ylim(-0.03, 1.03)
    for row, label in enumerate(("gmean, × unloaded", "p95, × unloaded", "SLO violations")):
        axes[row][0].set_ylabel(label)
    axes[0][0].legend()
    return _save(figure, folder / "figure_10.png")


def _figure_11(figures: PaperFigures, folder: Path) -> Path:
    figure, axes = charts.panels(2)
    for system in SHOWN:
        for axis, values in zip(axes, figures.turns[system], strict=True):
            ordered = np.sort(values[~np.isnan(values)])
            axis.plot(ordered, np.linspace(0, 1, len(ordered)), label=system)
    for axis, name in zip(axes, ("TTFT of a turn, s", "mean TBT of a turn, s"), strict=True):
        axis.set_xscale("log")
        axis.set_xlabel(name)
    axes[1].set_xticks([0.012, 0.015, 0.02, 0.03, 0.05, 0.08], ["12 ms", "15", "20", "30", "50", "80"])
    axes[1].minorticks_off()
    axes[0].set_ylabel("share of turns")
    axes[0].legend()
    return _save(figure, folder / "figure_11.png")


def _figure_12(figures: PaperFigures, folder: Path) -> Path:
    figure, axes = charts.panels(4, columns=4)
    errors = [run.error_rate * 100 for run in figures.by_error]
    ours = figures.saturated["prefiller"]
    for metric, title in METRICS.items():
        axes[0].plot(errors, [getattr(run, metric).gmean for run in figures.by_error], "o-", label=title)
        axes[1].plot(errors, [getattr(run, metric).p95 for run in figures.by_error], "o-", label=title)
        axes[2].plot(errors, [getattr(run, metric).violations for run in figures.by_error], "o-", label=title)
    axes[3].plot(errors, [run.tokens_per_joule for run in figures.by_error], "o-", label="AMPD")
    axes[3].axhline(ours.tokens_per_joule, linestyle="--", label="ours")
    names = ("gmean, × unloaded", "p95, × unloaded", "SLO violations", "tokens/J")
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(name)
        axis.set_xlabel("wrong predictions, %")
        axis.legend()
    return _save(figure, folder / "figure_12.png")


def _figure_13(figures: PaperFigures, folder: Path) -> Path:
    figure, axes = charts.panels(4, columns=4)
    where = np.arange(len(SHOWN))
    for offset, (name, runs) in enumerate(
        (
            (f"{a40.LIMIT_W:.0f} W", figures.saturated),
            (f"{a40.CAP_W:.0f} W decoders", figures.capped),
        )
    ):
        for axis, metric in zip(axes, METRICS, strict=False):
            heights = [getattr(runs[system], metric).p95_s for system in SHOWN]
            axis.bar(where + 0.4 * offset, heights, width=0.4, label=name)
        heights = [runs[system].tokens_per_joule for system in SHOWN]
        axes[3].bar(where + 0.4 * offset, heights, width=0.4, label=name)
    for axis, title in zip(axes, (*(f"p95 {name}, s" for name in METRICS.values()), "tokens/J"), strict=True):
        axis.set_title(title)
        axis.set_xticks(where + 0.2, [system.replace("_", "\n") for system in SHOWN])
    for axis in (axes[0], axes[2]):  # a thousandfold lies between the systems
        axis.set_yscale("log")
    axes[1].legend(loc="lower right")
    return _save(figure, folder / "figure_13.png")


def _save(figure: Figure, path: Path) -> Path:
    charts.save(figure, path)
    return path
