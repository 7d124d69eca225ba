"""Faults: a process of the fleet is killed, stopped for a while, or cannot write for a while.

A full disk is a limit on the size of files (`prlimit`): writes fail with an error, and it needs no rights. It
is lifted again, as somebody would make room.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import psutil

from deploy.home import FleetHome
from deploy.lifecycle.down import marked

ENGINE = ("VLLM::EngineCore", "VLLM::Worker", "vllm.entrypoints")
KEEPS = ("ray::KeeperActor",)
FRONT = ("router.gateway", "router.batch", "ray::DirectoryActor", "ray::GatewaysActor")
RAY = ("gcs_server", "raylet/raylet")
WRITES = ("ray::DirectoryActor", "router.batch")
STOPPED_S, FULL_S = (0.5, 12.0), (1.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one kind of process, and for how long."""

    kind: str  # kill, stop, full
    victim: str
    seconds: float = 0.0

    @property
    def on_an_engine(self) -> bool:
        """These take a start to mend; Ray's own processes take keepers and directory with them."""
        return self.victim in (*ENGINE, *RAY)

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.victim}{lasts}"


def faults(random: Random) -> Iterator[Fault]:
    while True:
        kind = random.choices(("kill", "stop", "full"), (6, 3, 1))[0]
        if kind == "kill":
            yield Fault(kind, random.choice(random.choice((ENGINE, ENGINE, FRONT, KEEPS, RAY))))
        elif kind == "stop":
            victim = random.choice((*ENGINE, *FRONT, *KEEPS))
            yield Fault(kind, victim, random.uniform(*STOPPED_S))
        else:
            yield Fault(kind, random.choice(WRITES), random.uniform(*FULL_S))


def victims(home: FleetHome, name: str) -> list[psutil.Process]:
    found = []
    for process in marked(home):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if name in line and "workers.host" not in line:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def inflict(
    home: FleetHome, fault: Fault, random: Random, sleep: Callable[[float], None] = time.sleep
) -> int:
    """The pid that was hit; 0: there is none of that kind just now."""
    found = victims(home, fault.victim)
    if not found:
        return 0
    process = random.choice(found)
    try:
        if fault.kind == "kill":
            process.kill()
            return process.pid
        most = process.rlimit(psutil.RLIMIT_FSIZE)[1]
        if fault.kind == "stop":
            process.send_signal(signal.SIGSTOP)
        else:
            process.rlimit(psutil.RLIMIT_FSIZE, (0, most))
    except psutil.NoSuchProcess:
        return 0
    try:
        sleep(fault.seconds)
    finally:
        with suppress(psutil.NoSuchProcess):  # something else ended it meanwhile
            if fault.kind == "stop":
                process.send_signal(signal.SIGCONT)
            else:
                process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    return process.pid
