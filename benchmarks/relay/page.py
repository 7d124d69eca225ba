"""The page that a run writes: what was measured, on what, and how to measure it again."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from benchmarks.relay.report import COLUMNS, FEW, FIRST, MANY, STEP, WHOLE, Table

HEAD = """# What a token costs on its way through the gateway

Written by `{command}`; run it again to replace it. {machine}

One fake engine that emits events in the shape of vLLM's, one client that checks status, framing, order
and number of tokens, and one subject at a time between them, alone on its processor; engine, client and
our directory have the other. Processor time is the scheduler's own count of the subject's threads,
kernel work included: on loopback that is what delivers the packets, most of the cost of each subject.
Figures are medians of the repetitions, for `late` and `errors` the worst one. A ratio is the median of the
repetitions' own ratios; beside several peers, the least favourable one.

`conserve` is the relay alone, `conserve gateway` the whole gateway with identity, binding by a
directory, relay, observer, metrics and a log line a turn. `fastapi+httpx` is the proxy that is usually
written first, given an eighth of each load; LiteLLM and Ray Serve (an ingress that streams from a replica's
handle, as in Serve LLM) are given a sixteenth. A stream is late when it ends more than half a second after
the engine's schedule.

![CPU a token and requests a core]({plot})
"""
ABOUT = {
    STEP: "256 streams at 40 tokens/s that advance together, as in a decode batch",
    MANY: "1,000 streams at 40 tokens/s, begun within a fifth of a second",
    FEW: "100 streams at 20 tokens/s: latency",
    WHOLE: "64 connections ask for whole answers without a pause",
    FIRST: "the same, each request the first turn of a new conversation",
}


def machine() -> str:
    name = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    processors = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"Machine: {processors} processors ({name}), {memory:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}."
    )


def written(table: Table, figures: Mapping[str, float | None], plot: str, *, quick: bool) -> str:
    command = f"python -m benchmarks.relay{' --quick' if quick else ''} --page docs/measurements/relay-run.md"
    parts = [HEAD.format(command=command, machine=machine(), plot=plot)]
    for scenario, rows in table.items():
        columns = [
            (key, title, scale)
            for key, title, scale in COLUMNS
            if any(row.get(key) is not None for row in rows.values())
        ]
        parts.append(f"## {ABOUT[scenario]}\n")
        parts.append("| | " + " | ".join(title for _, title, _ in columns) + " |")
        parts.append("|---" + "|---:" * len(columns) + "|")
        for subject, row in rows.items():
            cells = ("" if (value := row[key]) is None else shown(value * scale) for key, _, scale in columns)
            parts.append(f"| {subject} | " + " | ".join(cells) + " |")
        parts.append("")
    parts.append("## Named figures\n\n| figure | value |\n|---|---:|")
    parts += [f"| `{name}` | {'–' if value is None else shown(value)} |" for name, value in figures.items()]
    return "\n".join(parts) + "\n"


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
