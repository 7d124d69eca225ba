"""Inflicts faults: kills a process of the fleet, stops it, delays it, or keeps it from writing for a while.

A full disk is a limit on the size of files (`prlimit`): writes fail with an error, and no rights are needed.
A delay stops the sender or receiver again and again for parts of a second. If allowed, the machine's clock is
set an hour forward or back, and later set right.
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
from workers.keeper.launch import SERVER

ENGINE = ("VLLM::EngineCore", SERVER)
KEEPS = ("ray::KeeperActor",)
FRONT = (
    "router.gateway.main",
    "router.batch",
    "deploy.directory",
    "ray::DirectoryActor",
    "ray::GatewaysActor",
)
RAY = ("gcs_server", "raylet/raylet")
WRITES = ("deploy.directory", "router.batch", "router.gateway.main")
KINDS = ("kill", "stop", "delay", "full", "clock")
SECONDS = {"stop": (0.5, 12.0), "delay": (3.0, 15.0), "full": (1.0, 6.0), "clock": (5.0, 20.0)}
DELAY_S, BETWEEN_S = (0.02, 0.4), (0.01, 0.1)
HOUR_S = 3600.0
_CLOCK = Lock()  # one fault at a time sets it


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, the kind of process that it hits, and its duration."""

    kind: str
    victim: str
    seconds: float = 0.0

    @property
    def on_an_engine(self) -> bool:
        """Return whether the fault makes an engine restart. The loss of a process of Ray does so, too."""
        return self.victim in (*ENGINE, *RAY)

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} {self.victim}{lasts}"


def faults(random: Random, *, clock: bool = False, only_engines: bool = False) -> Iterator[Fault]:
    """Yield random faults. `clock` adds shifts of the clock; with `only_engines`, only engines are killed."""
    while True:
        if only_engines:
            yield Fault("kill", random.choice(ENGINE))
            continue
        kind = random.choices(KINDS, (6, 3, 2, 1, int(clock)))[0]
        victims = {
            "kill": random.choice((ENGINE, ENGINE, FRONT, KEEPS, RAY)),
            "full": WRITES,
            "clock": ("forward", "back"),
        }
        victim = random.choice(victims.get(kind, (*ENGINE, *FRONT, *KEEPS)))
        yield Fault(kind, victim, random.uniform(*SECONDS[kind]) if kind in SECONDS else 0.0)


def inflict(
    home: FleetHome, fault: Fault, random: Random, sleep: Callable[[float], None] = time.sleep
) -> int:
    """Inflict a fault and end it; return the pid of the process that was hit, or 0 if none runs."""
    if fault.kind == "clock":
        set_clock(HOUR_S if fault.victim == "forward" else -HOUR_S, fault.seconds, sleep)
        return 1
    found = victims(home, fault.victim)
    if not found:
        return 0
    process, stops = random.choice(found), fault.kind in ("stop", "delay")
    try:
        if fault.kind == "kill":
            process.kill()
            return process.pid
        most = process.rlimit(psutil.RLIMIT_FSIZE)[1]
        if stops:
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
        with suppress(psutil.NoSuchProcess):  # another fault may have ended it
            if stops:
                process.send_signal(signal.SIGCONT)
            else:
                process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    return process.pid


def victims(home: FleetHome, name: str) -> list[psutil.Process]:
    """Return the fleet's processes whose command line contains `name`, sorted by pid."""
    found = []
    for process in marked(home):
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if name in line and "workers.host" not in line:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def delay(process: psutil.Process, seconds: float, random: Random, sleep: Callable[[float], None]) -> None:
    """Delay everything that a process sends and receives, by stopping it again and again."""
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
    """Shift the machine's clock by `by_s` for `seconds`, then set it right again."""
    with _CLOCK:
        right = time.time() - time.monotonic()
        change(time.CLOCK_REALTIME, right + time.monotonic() + by_s)
        try:
            sleep(seconds)
        finally:
            change(time.CLOCK_REALTIME, right + time.monotonic())
