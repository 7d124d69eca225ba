"""Markdown of pages that benchmarks write: the machine, numbers and tables."""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path


def machine() -> str:
    """Return a sentence about this machine's processors, memory and software."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"Machine: {len(os.sched_getaffinity(0))} processors ({name}), {memory:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}."
    )


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose first column is text and whose others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]
