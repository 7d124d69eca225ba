"""Memory of an engine's processes, and the limit on it.

Only anonymous memory counts, because shared memory, files and libraries do not grow while an engine serves.
The exact number is expensive, because the kernel walks page tables for it. It is read only if an upper bound,
in which pages shared by forks count more than once, exceeds the limit.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 1 << 30
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROWTH_SHARE = 0.25  # share of the machine's memory by which an engine may grow beyond its idle memory
_MOST_SHARE = 0.9  # highest default limit, as a share of the machine's memory


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Limit on the total memory of an engine's processes."""

    limit_bytes: int
    idle_bytes: int

    @classmethod
    def of(
        cls, memory_gib: float | None, kv_gib: float, idle_bytes: int, machine_bytes: int
    ) -> "MemoryLimit":
        """Return a limit of `memory_gib`; if None, of idle memory, host KV and a quarter of the machine."""
        if memory_gib is not None:
            return cls(int(memory_gib * GIB), idle_bytes)
        grown = idle_bytes + kv_gib * GIB + _GROWTH_SHARE * machine_bytes
        return cls(int(min(grown, _MOST_SHARE * machine_bytes)), idle_bytes)

    def reached(self, has_bytes: int) -> str:
        """Return an error that compares `has_bytes` with the limit, empty if the limit is not exceeded."""
        if has_bytes <= self.limit_bytes:
            return ""
        has, limit, idle = (value / GIB for value in (has_bytes, self.limit_bytes, self.idle_bytes))
        return (
            f"its processes had {has:.1f} GiB of memory and may have {limit:.1f} GiB (idle: {idle:.1f} GiB); "
            "if that was ordinary work, raise engine.memory_gib"
        )


def machine_bytes() -> int:
    """Return the memory of this machine, or the memory limit of this container if that is less."""
    total = int(psutil.virtual_memory().total)
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def session_bytes(leader: int, enough: int = 0) -> int:
    """Return the memory of the session that `leader` leads, or an upper bound that is at most `enough`."""
    pids = list(_session(leader))
    upper = sum(map(_unshared_bytes, pids))
    return upper if upper <= enough else sum(map(_exact_bytes, pids))


def _session(leader: int) -> Iterator[int]:
    for pid in psutil.pids():
        with suppress(OSError):
            if os.getsid(pid) == leader:
                yield pid


def _unshared_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * _PAGE
    return 0


def _exact_bytes(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return _unshared_bytes(pid)
