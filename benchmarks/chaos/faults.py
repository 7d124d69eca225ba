"""Faults: a process of the fleet is killed, stopped, slowed down, or cannot write, for a while.

A full disk is a limit on the size of files (`prlimit`): writes fail with an error, and it needs no rights. It
is lifted again, as somebody would make room. What delays packets here is that their sender or receiver is
stopped again and again for parts of a second. The machine's clock is set only where that is allowed: an hour
forward or back, and later right again.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from threading import Lock

import psutil

from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from workers.launch import SERVER

ENGINE = ("VLLM::EngineCore", SERVER)
KEEPS = ("ray::KeeperActor",)
FRONT = ("router.gateway", "router.batch", "ray::DirectoryActor", "ray::GatewaysActor")
RAY = ("gcs_server", "raylet/raylet")
WRITES = ("ray::DirectoryActor", "router.batch", "router.gateway")
STOPPED_S, FULL_S, SLOW_S, SET_S = (0.5, 12.0), (1.0, 6.0), (3.0, 15.0), (5.0, 20.0)
DELAY_S, BETWEEN_S = (0.02, 0.4), (0.01, 0.1)
HOUR_S = 3600.0
_CLOCK = Lock()  # it is set by one at a time


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one kind of process, and for how long."""

    kind: str  # kill, stop, delay, full, clock
    victim: str
    seconds: float = 0.0

    @property
    def on_an_engine(self) -> bool:
        """These take a start to mend; Ray's own processes take keepers and directory with them."""
        return self.victim in (*ENGINE, *RAY)

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.victim}{lasts}"


def faults(random: Random, *, clock: bool = False, only_engines: bool = False) -> Iterator[Fault]:
    """`clock`: the machine's may be set. `only_engines`: they are killed, and nothing else is done."""
    while True:
        if only_engines:
            yield Fault("kill", random.choice(ENGINE))
            continue
        kind = random.choices(("kill", "stop", "delay", "full", "clock"), (6, 3, 2, 1, int(clock)))[0]
        if kind == "kill":
            yield Fault(kind, random.choice(random.choice((ENGINE, ENGINE, FRONT, KEEPS, RAY))))
        elif kind in ("stop", "delay"):
            victim = random.choice((*ENGINE, *FRONT, *KEEPS))
            yield Fault(kind, victim, random.uniform(*(STOPPED_S if kind == "stop" else SLOW_S)))
        elif kind == "clock":
            yield Fault(kind, random.choice(("forward", "back")), random.uniform(*SET_S))
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
    if fault.kind == "clock":
        set_clock(HOUR_S if fault.victim == "forward" else -HOUR_S, fault.seconds, sleep)
        return 1
    found = victims(home, fault.victim)
    if not found:
        return 0
    process = random.choice(found)
    try:
        if fault.kind == "kill":
            process.kill()
            return process.pid
        most = process.rlimit(psutil.RLIMIT_FSIZE)[1]
        if fault.kind in ("stop", "delay"):
            process.send_signal(signal.SIGSTOP)
        else:
            process.rlimit(psutil.RLIMIT_FSIZE, (0, most))
    except psutil.NoSuchProcess:
        return 0
    try:
        if fault.kind == "delay":
            with suppress(psutil.NoSuchProcess):
                delay(process, fault.seconds, random, sleep)
        else:
            sleep(fault.seconds)
    finally:
        with suppress(psutil.NoSuchProcess):  # something else ended it meanwhile
            if fault.kind in ("stop", "delay"):
                process.send_signal(signal.SIGCONT)
            else:
                process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    return process.pid


def delay(process: psutil.Process, seconds: float, random: Random, sleep: Callable[[float], None]) -> None:
    """What it sends and receives comes later, by a part of a second each time. It begins and ends stopped."""
    left = seconds
    while left > 0:
        late, between = random.uniform(*DELAY_S), random.uniform(*BETWEEN_S)
        sleep(late)
        process.send_signal(signal.SIGCONT)
        sleep(between)
        process.send_signal(signal.SIGSTOP)
        left -= late + between


def set_clock(
    by_s: float,
    seconds: float,
    sleep: Callable[[float], None] = time.sleep,
    change: Callable[[int, float], None] = time.clock_settime,
) -> None:
    """The machine's, and right again by the time that passed meanwhile."""
    with _CLOCK:
        right = time.time() - time.monotonic()
        change(time.CLOCK_REALTIME, right + time.monotonic() + by_s)
        try:
            sleep(seconds)
        finally:
            change(time.CLOCK_REALTIME, right + time.monotonic())
