"""Medians, named figures and the page of `benchmarks.relay`."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.harness.page import machine, shown, table_lines

STEP, MANY, FEW = "256x40 in step", "1000x40", "100x20"
WHOLE, FIRST = "whole answers", "first turns"
OURS, SEALED, GATEWAY = "conserve", "conserve tls", "conserve gateway"
SLOW = "fastapi+httpx"
RUST_PEERS = ("sglang-router", "vllm-router")
CPU = "cpu_ms_per_1k_tokens"
COLUMNS = {
    "connections": ("conns", 1.0),
    CPU: ("CPU ms/1k tok", 1.0),
    "first_token_p50_s": ("first token ms", 1e3),
    "delay_p50_s": ("delay p50 ms", 1e3),
    "delay_p99_s": ("p99 ms", 1e3),
    "late_streams": ("late", 1.0),
    "requests_per_s": ("req/s", 1.0),
    "requests_per_core_s": ("req/s/core", 1.0),
    "memory_mb": ("RSS MB", 1.0),
    "errors": ("errors", 1.0),
}
WORST = ("late_streams", "errors")
ABOUT = {
    STEP: "256 streams at 40 tokens/s that advance together, as in a decode batch",
    MANY: "1,000 streams at 40 tokens/s, begun within a fifth of a second",
    FEW: "100 streams at 20 tokens/s: latency",
    WHOLE: "64 connections ask for whole answers without a pause",
    FIRST: "the same, each request the first turn of a new conversation",
}
HEAD = """# Cost of a token on its way through the gateway

`{command}` writes this page. {machine}

A fake engine emits events in the shape of vLLM's, and a client checks status, framing, order and number of
tokens. One subject at a time stands between them, alone on its processor; engine, client and our directory
have the other. Processor time is the scheduler's count of the subject's threads, kernel work included,
which on loopback delivers the packets and is most of each subject's cost. Figures are medians of the
repetitions, for `late` and `errors` the worst one. A ratio is the median of the repetitions' own ratios;
with several peers, the least favourable one. A stream is late when it ends more than half a second after
the engine's schedule.

`conserve` is the relay alone, `conserve gateway` the whole gateway with identity, binding by a directory,
relay, observer, metrics and a log line a turn. `fastapi+httpx` is the proxy that is usually written first,
and gets an eighth of each load.
"""

Results = dict[str, dict[str, list[dict[str, Any]]]]  # by scenario and subject, one entry a repetition
Table = dict[str, dict[str, dict[str, float | None]]]  # by scenario, subject and figure


def medians(results: Results) -> Table:
    """Return medians over repetitions; for lateness and errors the worst value."""
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
        """Return the median of the repetitions' own ratios: a machine drifts more between repetitions."""
        runs = results.get(scenario, {})
        pairs = zip(runs.get(mine, ()), runs.get(theirs, ()), strict=False)
        ratios = [own[key] / other[key] for own, other in pairs if own.get(key) and other.get(key)]
        return statistics.median(ratios) if ratios else None

    def against_rust(
        scenario: str, mine: str, pick: Callable[[list[float]], float] = max, key: str = CPU
    ) -> float | None:
        """Return the ratio to the best peer: the largest ratio of a cost, the smallest of a rate."""
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


def page(table: Table, figures: Mapping[str, float | None], *, quick: bool) -> str:
    """Return the Markdown of a page with all tables."""
    command = f"python -m benchmarks.relay{' --quick' if quick else ''} --page docs/measurements/relay-run.md"
    parts = [HEAD.format(command=command, machine=machine())]
    for scenario, rows in table.items():
        keys = [key for key in COLUMNS if any(row.get(key) is not None for row in rows.values())]
        lines = [
            [
                subject,
                *("" if (value := row[key]) is None else shown(value * COLUMNS[key][1]) for key in keys),
            ]
            for subject, row in rows.items()
        ]
        parts += [
            f"## {ABOUT[scenario]}\n",
            *table_lines(["", *(COLUMNS[key][0] for key in keys)], lines),
            "",
        ]
    named = [[f"`{name}`", "–" if value is None else shown(value)] for name, value in figures.items()]
    parts += ["## Named figures\n", *table_lines(["figure", "value"], named)]
    return "\n".join(parts) + "\n"
