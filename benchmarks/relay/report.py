"""Computes the medians and the named figures of `benchmarks.relay`."""

import statistics
from collections.abc import Callable
from typing import Any

STEP, MANY, FEW = "256x40 in step", "1000x40", "100x20"
WHOLE, FIRST = "whole answers", "first turns"
OURS, SEALED, GATEWAY = "conserve", "conserve tls", "conserve gateway"
SLOW = "fastapi+httpx"
RUST_PEERS = ("sglang-router", "vllm-router")
CPU = "cpu_ms_per_1k_tokens"
COLUMNS = (
    *("connections", CPU, "first_token_p50_s", "delay_p50_s", "delay_p99_s", "late_streams"),
    *("requests_per_s", "requests_per_core_s", "memory_mb", "errors"),
)
WORST = ("late_streams", "errors")

Results = dict[str, dict[str, list[dict[str, Any]]]]  # by scenario and subject, one entry a repetition
Table = dict[str, dict[str, dict[str, float | None]]]  # by scenario, subject and figure


def medians(results: Results) -> Table:
    """Return each figure's median over repetitions; for lateness and errors, the worst value."""
    table: Table = {}
    for scenario, by_subject in results.items():
        for subject, repetitions in by_subject.items():
            row: dict[str, float | None] = {}
            for key in COLUMNS:
                values = [run[key] for run in repetitions if run.get(key) is not None]
                pick = max if key in WORST else statistics.median
                row[key] = pick(values) if values else None
            table.setdefault(scenario, {})[subject] = row
    return table


def named_figures(results: Results, table: Table) -> dict[str, float | None]:
    def of(scenario: str, subject: str, key: str) -> float | None:
        return table.get(scenario, {}).get(subject, {}).get(key)

    def against(scenario: str, mine: str, theirs: str, key: str = CPU) -> float | None:
        """Return the median over repetitions of the ratio of `mine` to `theirs`."""
        runs = results.get(scenario, {})
        pairs = zip(runs.get(mine, ()), runs.get(theirs, ()), strict=False)
        ratios = [own[key] / other[key] for own, other in pairs if own.get(key) and other.get(key)]
        return statistics.median(ratios) if ratios else None

    def against_rust(
        scenario: str, mine: str, pick: Callable[[list[float]], float] = max, key: str = CPU
    ) -> float | None:
        """Return our ratio to the best of the Rust routers; `pick` is max for a cost, and min for a rate."""
        found = [ratio for peer in RUST_PEERS if (ratio := against(scenario, mine, peer, key)) is not None]
        return pick(found) if found else None

    first, direct = of(FEW, OURS, "first_token_p50_s"), of(FEW, "direct", "first_token_p50_s")
    return {
        "cpu_ms_per_1k_tokens": of(STEP, OURS, CPU),
        "cpu_vs_haproxy": against(STEP, OURS, "haproxy"),
        "cpu_vs_httpx_proxy": against(STEP, OURS, SLOW),
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
