"""Measures the CPU time of one play: by kind of the contender's processes, and of all other processes.

A contender's processes have a mark in their environment or descend from a process that has it. The process
tree does not suffice, because Ray's daemons leave it; the mark does not suffice, because engines overwrite
their environment with their titles. On two shared cores, times to the first token vary by half, while the CPU
seconds of the same conversations hardly vary.
"""

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex

import psutil

from workers.keeper.launch import SERVER

MARK = "CONSERVE_BENCHMARK_RUN"
# Texts in command lines, each with the kind of process that it shows. The first text that matches decides.
KINDS = (
    ("VLLM::Worker", "model"),
    ("VLLM::EngineCore", "engine core"),  # and the model, where there is no worker
    (SERVER, "engine server"),
    ("api_server", "engine server"),  # a peer's
    ("router.gateway.main", "router"),
    ("launch_router", "router"),
    ("vllm-router", "router"),
    ("router.batch", "batch"),
    ("deploy.directory", "directory"),
    ("ray", "ray"),
)


def mark() -> None:
    """Set the mark in this process's environment, which all processes that it starts inherit."""
    os.environ[MARK] = token_hex(8)


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds used so far by each process of a contender, and by the whole machine."""

    processes: dict[tuple[int, str], float]
    machine: float

    def since(self, before: "CpuTime") -> tuple[dict[str, float], float]:
        """Return the CPU seconds since `before` of each kind of process, and of all other processes."""
        took: defaultdict[str, float] = defaultdict(float)
        for process, seconds in self.processes.items():
            took[process[1]] += seconds - before.processes.get(process, 0.0)
        return dict(took), max(0.0, self.machine - before.machine - sum(took.values()))


def now() -> CpuTime:
    marked: dict[int, bool] = {}
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error), process.oneshot():
            if _is_marked(process, marked):
                times = process.cpu_times()
                found[process.pid, _kind(process)] = times.user + times.system
    busy = psutil.cpu_times()
    return CpuTime(found, sum(busy) - busy.idle - getattr(busy, "iowait", 0.0) - getattr(busy, "guest", 0.0))


def _is_marked(process: psutil.Process, known: dict[int, bool]) -> bool:
    if process.pid not in known:
        known[process.pid] = False  # for a process that ends during the look-up
        parent = process.parent()
        own = process.environ().get(MARK) == os.environ[MARK]
        known[process.pid] = own or (parent is not None and _is_marked(parent, known))
    return known[process.pid]


def _kind(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "player"
    line = " ".join(process.cmdline())
    return next((kind for part, kind in KINDS if part in line), "other")
