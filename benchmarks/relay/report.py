"""Medians, named figures, a table and a plot."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEP, MANY, FEW, WHOLE = "256x40 in step", "1000x40", "100x20", "whole answers"
FIRST = "first turns"
RUST_PEERS = ("sglang-router", "vllm-router")
OURS = "conserve"
GATEWAY = "conserve gateway"

Table = dict[str, dict[str, dict[str, float | None]]]
COLUMNS = (
    ("connections", "conns", 1.0),
    ("cpu_ms_per_1k_tokens", "CPU ms/1k tok", 1.0),
    ("first_token_p50_s", "first token ms", 1e3),
    ("delay_p50_s", "delay p50 ms", 1e3),
    ("delay_p99_s", "p99 ms", 1e3),
    ("late_streams", "late", 1.0),
    ("requests_per_s", "req/s", 1.0),
    ("requests_per_core_s", "req/s/core", 1.0),
    ("memory_mb", "RSS MB", 1.0),
    ("errors", "errors", 1.0),
)
WORST = ("late_streams", "errors")


def medians(results: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> Table:
    """One row a scenario and subject: medians over repetitions, for lateness and errors the worst."""
    table: Table = {}
    for scenario, by_subject in results.items():
        for subject, repetitions in by_subject.items():
            row: dict[str, float | None] = {}
            for key, _, _ in COLUMNS:
                values = [run[key] for run in repetitions if run.get(key) is not None]
                pick = max if key in WORST else statistics.median
                row[key] = pick(values) if values else None
            table.setdefault(scenario, {})[subject] = row
    return table


def named_figures(table: Table) -> dict[str, float | None]:
    def of(scenario: str, subject: str, key: str) -> float | None:
        return table.get(scenario, {}).get(subject, {}).get(key)

    def ratio(mine: float | None, theirs: float | None) -> float | None:
        return mine / theirs if mine is not None and theirs else None

    def best(scenario: str, key: str, pick: Any) -> float | None:
        values = [value for peer in RUST_PEERS if (value := of(scenario, peer, key)) is not None]
        return pick(values) if values else None

    cpu = of(STEP, OURS, "cpu_ms_per_1k_tokens")
    first, direct = of(FEW, OURS, "first_token_p50_s"), of(FEW, "direct", "first_token_p50_s")
    return {
        "cpu_ms_per_1k_tokens": cpu,
        "cpu_vs_haproxy": ratio(cpu, of(STEP, "haproxy", "cpu_ms_per_1k_tokens")),
        "cpu_vs_httpx_proxy": ratio(cpu, of(STEP, "fastapi+httpx", "cpu_ms_per_1k_tokens")),
        "cpu_vs_best_peer": ratio(cpu, best(STEP, "cpu_ms_per_1k_tokens", min)),
        "cpu_vs_best_peer_1000_streams": ratio(
            of(MANY, OURS, "cpu_ms_per_1k_tokens"), best(MANY, "cpu_ms_per_1k_tokens", min)
        ),
        "cpu_vs_haproxy_1000_streams": ratio(
            of(MANY, OURS, "cpu_ms_per_1k_tokens"), of(MANY, "haproxy", "cpu_ms_per_1k_tokens")
        ),
        "requests_per_s": of(WHOLE, OURS, "requests_per_s"),
        "requests_per_core_s": of(WHOLE, OURS, "requests_per_core_s"),
        "requests_per_core_vs_best_peer": ratio(
            of(WHOLE, OURS, "requests_per_core_s"), best(WHOLE, "requests_per_core_s", max)
        ),
        "added_ttft_p50_ms": (first - direct) * 1e3 if first is not None and direct is not None else None,
        "late_streams": of(MANY, OURS, "late_streams"),
        "gateway_cpu_vs_haproxy": ratio(
            of(STEP, GATEWAY, "cpu_ms_per_1k_tokens"), of(STEP, "haproxy", "cpu_ms_per_1k_tokens")
        ),
        "gateway_cpu_vs_best_peer": ratio(
            of(STEP, GATEWAY, "cpu_ms_per_1k_tokens"), best(STEP, "cpu_ms_per_1k_tokens", min)
        ),
        "gateway_cpu_vs_best_peer_1000_streams": ratio(
            of(MANY, GATEWAY, "cpu_ms_per_1k_tokens"), best(MANY, "cpu_ms_per_1k_tokens", min)
        ),
        "gateway_first_turns_per_core_s": of(FIRST, GATEWAY, "requests_per_core_s"),
        "gateway_requests_per_core_s": of(WHOLE, GATEWAY, "requests_per_core_s"),
        "gateway_late_streams": of(MANY, GATEWAY, "late_streams"),
    }


def render(table: Table, figures: Mapping[str, float | None]) -> str:
    lines: list[str] = []
    for scenario, rows in table.items():
        lines.append(f"\n{scenario}")
        lines.append(f"{'':18}" + "".join(f"{title:>15}" for _, title, _ in COLUMNS))
        for subject, row in rows.items():
            cells = (
                "" if (value := row[key]) is None else f"{value * scale:.4g}" for key, _, scale in COLUMNS
            )
            lines.append(f"{subject:18}" + "".join(f"{cell:>15}" for cell in cells))
    lines.append("")
    lines += [f"{name:32} {'–' if value is None else f'{value:.3f}'}" for name, value in figures.items()]
    return "\n".join(lines)


def plot(table: Table, path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    panels = (
        (STEP, "cpu_ms_per_1k_tokens", "CPU, ms per 1,000 tokens (256 × 40 in step)"),
        (MANY, "cpu_ms_per_1k_tokens", "CPU, ms per 1,000 tokens (1,000 × 40)"),
        (WHOLE, "requests_per_core_s", "requests per second and core (not streaming)"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4))
    for axis, (scenario, key, title) in zip(axes, panels, strict=True):
        rows = {
            subject: value
            for subject, row in table.get(scenario, {}).items()
            if subject != "direct" and (value := row[key]) is not None
        }
        colors = ["tab:orange" if subject in (OURS, GATEWAY) else "tab:gray" for subject in rows]
        axis.barh(list(rows), list(rows.values()), color=colors)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
