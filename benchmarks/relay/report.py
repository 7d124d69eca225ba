"""Medians, named figures, a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces import charts

STEP, MANY, FEW, WHOLE = "256x40 in step", "1000x40", "100x20", "whole answers"
FIRST = "first turns"
RUST_PEERS = ("sglang-router", "vllm-router")
OURS = "conserve"
SEALED = "conserve tls"
GATEWAY = "conserve gateway"

CPU = "cpu_ms_per_1k_tokens"

Table = dict[str, dict[str, dict[str, float | None]]]
Results = Mapping[str, Mapping[str, list[dict[str, Any]]]]
"""By scenario and subject, one entry a repetition."""
COLUMNS = (
    ("connections", "conns", 1.0),
    (CPU, "CPU ms/1k tok", 1.0),
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


def medians(results: Results) -> Table:
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


def named_figures(results: Results, table: Table) -> dict[str, float | None]:
    def of(scenario: str, subject: str, key: str) -> float | None:
        return table.get(scenario, {}).get(subject, {}).get(key)

    def against(scenario: str, mine: str, theirs: str, key: str = CPU) -> float | None:
        """The median of the repetitions' own ratios: a machine drifts more between them than within one."""
        runs = results.get(scenario, {})
        pairs = zip(runs.get(mine, ()), runs.get(theirs, ()), strict=False)
        ratios = [own[key] / other[key] for own, other in pairs if own.get(key) and other.get(key)]
        return statistics.median(ratios) if ratios else None

    def against_rust(scenario: str, mine: str, pick: Any = max, key: str = CPU) -> float | None:
        """Beside the peer that does best: the largest ratio of a cost, the smallest of a rate."""
        found = [ratio for peer in RUST_PEERS if (ratio := against(scenario, mine, peer, key)) is not None]
        return pick(found) if found else None

    first, direct = of(FEW, OURS, "first_token_p50_s"), of(FEW, "direct", "first_token_p50_s")
    return {
        "cpu_ms_per_1k_tokens": of(STEP, OURS, CPU),
        "cpu_vs_haproxy": against(STEP, OURS, "haproxy"),
        "cpu_vs_httpx_proxy": against(STEP, OURS, "fastapi+httpx"),
        "cpu_vs_best_peer": against_rust(STEP, OURS),
        "cpu_vs_best_peer_1000_streams": against_rust(MANY, OURS),
        "cpu_vs_haproxy_1000_streams": against(MANY, OURS, "haproxy"),
        "requests_per_s": of(WHOLE, OURS, "requests_per_s"),
        "requests_per_core_s": of(WHOLE, OURS, "requests_per_core_s"),
        "requests_per_core_vs_best_peer": against_rust(WHOLE, OURS, min, "requests_per_core_s"),
        "added_ttft_p50_ms": (first - direct) * 1e3 if first is not None and direct is not None else None,
        "late_streams": of(MANY, OURS, "late_streams"),
        "tls_cpu_vs_plain": against(STEP, SEALED, OURS),
        "tls_cpu_vs_plain_1000_streams": against(MANY, SEALED, OURS),
        "tls_cpu_vs_haproxy": against(STEP, SEALED, "haproxy tls"),
        "tls_requests_per_core_vs_plain": against(WHOLE, SEALED, OURS, "requests_per_core_s"),
        "gateway_cpu_vs_haproxy": against(STEP, GATEWAY, "haproxy"),
        "gateway_cpu_vs_best_peer": against_rust(STEP, GATEWAY),
        "gateway_cpu_vs_best_peer_1000_streams": against_rust(MANY, GATEWAY),
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
    panels = (
        (STEP, "cpu_ms_per_1k_tokens", "CPU, ms per 1,000 tokens (256 × 40 in step)"),
        (MANY, "cpu_ms_per_1k_tokens", "CPU, ms per 1,000 tokens (1,000 × 40)"),
        (WHOLE, "requests_per_core_s", "requests per second and core (not streaming)"),
    )
    figure, axes = charts.panels(len(panels), columns=len(panels))
    for axis, (scenario, key, title) in zip(axes, panels, strict=True):
        rows = {
            subject: value
            for subject, row in table.get(scenario, {}).items()
            if subject != "direct" and (value := row[key]) is not None
        }
        colours = [charts.COLOURS[subject in (OURS, GATEWAY)] for subject in rows]
        axis.barh(list(rows), list(rows.values()), color=colours)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=9)
        axis.invert_yaxis()
    charts.save(figure, path)
