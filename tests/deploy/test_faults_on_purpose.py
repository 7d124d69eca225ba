"""Each fault that `benchmarks.chaos` inflicts has its effect on a process, and the effect ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random

import psutil
import pytest

from benchmarks.chaos.faults import ENGINE, FRONT, KEEPS, RAY, Fault, faults, inflict, set_clock
from deploy.home import FleetHome
from workers.keeper.launch import FLEET_MARK

WRITER = """
import sys, time
print("router.batch", flush=True)
while True:
    try:
        open(sys.argv[1], "ab", buffering=0).write(b"x" * 100)
    except OSError:
        open(sys.argv[1] + ".full", "ab")
    time.sleep(0.01)
"""


@pytest.fixture
def home(tmp_path: Path) -> FleetHome:
    return FleetHome(tmp_path)


@pytest.fixture
def writer(home: FleetHome, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of the fleet that writes to a file continuously."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "written"), "router.batch"]
    process = subprocess.Popen(command, env={**os.environ, FLEET_MARK: home.mark}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def until(true: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_kill_fault_ends_its_process(home: FleetHome, writer: "subprocess.Popen[bytes]") -> None:
    assert inflict(home, Fault("kill", "router.batch"), Random(0)) == writer.pid
    assert writer.wait(10) == -signal.SIGKILL


def test_a_process_stopped_by_the_stop_fault_continues_afterwards(
    home: FleetHome, writer: "subprocess.Popen[bytes]"
) -> None:
    seen = []
    process = psutil.Process(writer.pid)

    def asleep(seconds: float) -> None:
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        seen.append(seconds)

    assert inflict(home, Fault("stop", "router.batch", 2.5), Random(0), asleep) == writer.pid
    assert seen == [2.5]
    until(lambda: process.status() != psutil.STATUS_STOPPED)


def test_the_full_disk_fault_makes_writes_fail_until_it_ends(
    home: FleetHome, writer: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    written, full = tmp_path / "written", tmp_path / "written.full"
    until(written.exists)

    def asleep(seconds: float) -> None:
        until(full.exists)

    assert inflict(home, Fault("full", "router.batch", 1.0), Random(0), asleep) == writer.pid
    before = written.stat().st_size
    until(lambda: written.stat().st_size > before)


def test_the_delay_fault_slows_a_process_repeatedly_and_then_lets_it_continue(
    home: FleetHome, writer: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    process, states = psutil.Process(writer.pid), list[bool]()

    def asleep(seconds: float) -> None:
        time.sleep(0.02)
        states.append(process.status() == psutil.STATUS_STOPPED)

    assert inflict(home, Fault("delay", "router.batch", 2.0), Random(0), asleep) == writer.pid
    assert states[::2] == [True] * len(states[::2]) and states[1::2] == [False] * len(states[1::2])
    assert len(states) >= 8
    until(lambda: process.status() != psutil.STATUS_STOPPED)


@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
def test_the_clock_fault_shifts_the_clock_and_sets_it_right_afterwards(by_s: float) -> None:
    """The test does not change the clock of this machine."""
    changes: list[float] = []
    set_clock(by_s, 0.2, change=lambda _, at: changes.append(at - time.time()))
    assert changes == pytest.approx([by_s, 0.0], abs=0.1)


def test_faults_hit_only_processes_of_the_fleet(tmp_path: Path, writer: "subprocess.Popen[bytes]") -> None:
    assert inflict(FleetHome(tmp_path / "another"), Fault("kill", "router.batch"), Random(0)) == 0
    assert writer.poll() is None


def test_random_faults_hit_every_kind_of_process_eventually() -> None:
    coming = faults(Random(1))
    killed = {fault.victim for fault in (next(coming) for _ in range(400)) if fault.kind == "kill"}
    assert killed == {*ENGINE, *FRONT, *KEEPS, *RAY}
    kinds = {fault.kind for fault in (next(coming) for _ in range(400))}
    assert kinds == {"kill", "stop", "delay", "full"}
    assert {fault.kind for fault in islice(faults(Random(1), clock=True), 400)} == {*kinds, "clock"}
    assert {fault.victim for fault in islice(faults(Random(1), only_engines=True), 400)} == {*ENGINE}
