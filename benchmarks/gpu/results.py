"""Figures of `benchmarks.gpu`: each of its steps appends them to a file as soon as they are known."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def spread(name: str, seconds: Sequence[float]) -> Figures:
    """Return the median, p90 and maximum of `seconds`, as figures in ms named after `name`."""
    ordered = sorted(seconds)
    return {
        f"{name}_ms": statistics.median(ordered) * 1e3,
        f"{name}_p90_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))] * 1e3,
        f"{name}_max_ms": ordered[-1] * 1e3,
    }


def bandwidth(name: str, nbytes: int, seconds: Sequence[float]) -> Figures:
    """Return the bandwidth in GB/s of the median round and of the slowest round, named after `name`."""
    return {
        f"{name}_gbs": nbytes / statistics.median(seconds) / 1e9,
        f"{name}_slowest_gbs": nbytes / max(seconds) / 1e9,
    }


class ResultLog:
    """Appends the figures of one step to a file that other steps also append to."""

    def __init__(self, path: Path, step: str) -> None:
        self._path = path
        self._step = step

    def add(self, figures: Figures, repeat: int | None = None) -> None:
        """Append one line to the file immediately, so that a killed step loses none of its figures."""
        line = json.dumps(
            {"step": self._step, "at": round(time.time(), 3), "repeat": repeat, "figures": figures}
        )
        with self._path.open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)


def read_results(path: Path) -> dict[str, Figures]:
    """Return the figures of each step.

    Of a repeated figure the median is returned, with its lowest and highest value as `NAME_range`.
    Of any other figure the last value is returned.
    """
    found: dict[str, Figures] = {}
    repeated: dict[tuple[str, str], list[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a line that a killed process did not finish
        step = found.setdefault(entry["step"], {})
        step.update(entry["figures"])
        if entry.get("repeat") is None:
            continue
        for name, value in entry["figures"].items():
            if isinstance(value, float):
                values = repeated.setdefault((entry["step"], name), [])
                values.append(value)
                step[name] = statistics.median(values)
                step[f"{name}_range"] = [min(values), max(values)]
    return found


def compare_with_plain(found: dict[str, Figures]) -> None:
    """Add to the figures of each engine step their ratios to plain vLLM's figures, as `*_vs_plain`."""
    plain = found.get("plain", {})
    for name, figures in found.items():
        for figure, value in list(figures.items()) if name != "plain" else ():
            base = plain.get(figure.replace("handed_over_", "ttft_of_"))
            if figure.startswith(("tbt", "ttft", "handed_over")) and base and isinstance(value, float):
                figures[f"{figure.removesuffix('_s')}_vs_plain"] = value / base


def failed_steps(found: dict[str, Figures]) -> list[str]:
    """Return the steps that failed, ran out of time, or found wrong bytes or answers."""
    return [
        name
        for name, figures in found.items()
        if figures.get("outcome", "ok") != "ok" or figures.get("equal") is False
    ]


def page(machine: str, found: dict[str, Figures], device: str) -> str:
    """Return the results as a Markdown page. Times of a CPU run say nothing about GPUs and are left out."""
    lines = ["# GPU steps", "", f"`python -m benchmarks.gpu`, on {machine}.", ""]
    for name, figures in found.items():
        lines += [f"## {name}", "", "| figure | value |", "|---|---|"]
        for figure, value in figures.items():
            if isinstance(value, float) and not isinstance(value, bool):
                if device == "cuda" or figure.endswith("_vs_plain"):
                    lines.append(f"| {figure} | {value:.4g} |")
            else:
                lines.append(f"| {figure} | {value} |")
        lines.append("")
    return "\n".join(lines)
