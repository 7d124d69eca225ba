"""Resident memory of page ranges, as the system counts it."""

from pathlib import Path

from workers.engine.overload.pages.physical_memory import PhysicalMemory


def resident_bytes(memory: PhysicalMemory) -> int:
    spans = [(one.address, one.address + one.pages * memory.page_bytes) for one in memory.ranges]
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start = int(name.partition("-")[0], 16)
            counts = any(first <= start < last for first, last in spans)
        elif name == "Rss:" and counts:
            total += int(value.split()[0]) << 10
    return total
