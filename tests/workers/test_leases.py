"""A leased process outlives its starter, is adopted by its record, and never outlives its lease."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.log_lines import LINE
from workers import processes
from workers.host import SOUND_AFTER_S, SUPERVISOR
from workers.keeper.launch import ProcessCommand
from workers.keeper.process_lease import LEASE, LOG, RECORD, LeasedProcess
from workers.oom_score import OomScore

pytestmark = pytest.mark.slow

# A parent with a child, both of which ignore SIGTERM, as the worst engine would.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
open("child", "w").write(str(child.pid))
time.sleep(600)
"""


def start(
    directory: Path,
    lease_s: float = 30.0,
    grace_s: float = 0.2,
    supervisor: str = "",
    leave_s: float = 0.0,
    restart: bool = False,
) -> LeasedProcess:
    env = {**os.environ, "MARK_OF_TEST": str(directory), SUPERVISOR: supervisor}
    process = LeasedProcess.start(
        directory,
        ProcessCommand((sys.executable, "-c", STUBBORN), env),
        fingerprint="one",
        epoch=7,
        ports=(1, 2),
        lease_s=lease_s,
        grace_s=grace_s,
        oom_score=OomScore.ENGINE,
        leave_s=leave_s,
        restart=restart,
    )
    until(lambda: (directory / "child").exists() and (directory / "child").read_text() != "")
    return process


def until(true: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def left(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARK_OF_TEST") == str(directory):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for pid in left(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_the_first_sigterm_asks_for_an_end_and_the_second_ends_the_process(directory: Path) -> None:
    process = start(directory, leave_s=60.0)
    os.kill(process.record.pid, signal.SIGTERM)
    until(process.asked_to_end)
    time.sleep(0.5)
    assert process.alive() and len(left(directory)) == 3
    os.kill(process.record.pid, signal.SIGTERM)
    until(lambda: left(directory) == [])


def test_a_process_that_does_not_end_when_asked_is_ended_after_a_while(directory: Path) -> None:
    process = start(directory, leave_s=1.0)
    os.kill(process.record.pid, signal.SIGTERM)
    until(process.asked_to_end)
    until(lambda: left(directory) == [])
    (directory / "child").unlink()
    assert not start(directory, leave_s=1.0).asked_to_end(), "the next one has not been asked"


def test_ending_a_process_ends_its_whole_tree(directory: Path) -> None:
    process = start(directory)
    assert len(left(directory)) == 3  # host, command, its child
    assert process.end(0.2)
    until(lambda: not left(directory))


def test_a_lease_that_nobody_renews_ends_the_process_tree(directory: Path) -> None:
    process = start(directory, lease_s=1.0)
    for _ in range(4):
        time.sleep(0.4)
        process.renew()
    assert process.alive()
    until(lambda: not left(directory), 8.0)


@pytest.fixture
def supervisor() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def named(process: "subprocess.Popen[bytes]") -> str:
    return f"{process.pid} {psutil.Process(process.pid).create_time()}"


def test_a_leased_process_outlives_its_keeper_while_the_supervisor_lives(
    directory: Path, supervisor: "subprocess.Popen[bytes]"
) -> None:
    process = start(directory, lease_s=1.0, supervisor=named(supervisor))
    time.sleep(4.0)
    assert process.alive()
    supervisor.kill()
    supervisor.wait()
    until(lambda: not left(directory), 8.0)


def test_a_removed_lease_ends_the_process_under_a_supervisor_too(
    directory: Path, supervisor: "subprocess.Popen[bytes]"
) -> None:
    start(directory, supervisor=named(supervisor)).expire()
    until(lambda: not left(directory), 5.0)


def test_a_process_without_a_record_ends_although_a_supervisor_lives(
    directory: Path, supervisor: "subprocess.Popen[bytes]"
) -> None:
    """The keeper was killed before it wrote the record, or another host wrote a record in its place."""
    process = start(directory, lease_s=1.0, supervisor=named(supervisor))
    replace(process.record, pid=1).write(directory / RECORD)
    deadline = time.monotonic() + 8.0
    while left(directory):
        assert time.monotonic() < deadline
        process.renew()
        time.sleep(0.1)


def test_a_removed_lease_ends_the_process_tree_within_seconds(directory: Path) -> None:
    start(directory, lease_s=600)
    (directory / LEASE).unlink()
    until(lambda: not left(directory), 5.0)


def test_the_children_of_a_command_that_died_are_ended(directory: Path) -> None:
    start(directory)
    child = psutil.Process(int((directory / "child").read_text()))
    child.parent().kill()  # type: ignore[union-attr]
    until(lambda: not left(directory), 5.0)


def test_a_host_starts_a_killed_command_again_and_leaves_none_of_its_children(directory: Path) -> None:
    process = start(directory, restart=True)
    (command,) = psutil.Process(process.record.pid).children()
    child = int((directory / "child").read_text())
    time.sleep(SOUND_AFTER_S)
    command.kill()
    until(lambda: (directory / "child").read_text() not in ("", str(child)))
    (line,) = (directory / LOG).read_text().splitlines()
    assert (found := LINE.match(line)) and found["event"].startswith("restarts_killed_command signal=9"), line
    assert process.alive() and child not in left(directory)
    children = psutil.Process(process.record.pid).children()
    (again,) = (one for one in children if one.status() != psutil.STATUS_ZOMBIE)
    again.kill()  # soon after its start
    until(lambda: not process.alive())
    until(lambda: not left(directory))


def test_a_leased_process_survives_its_starter_and_is_adopted(directory: Path) -> None:
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.workers.test_leases import start
start(Path({str(directory)!r}))
import os, signal; os.kill(os.getpid(), signal.SIGKILL)
"""
    starter = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert starter.returncode == -signal.SIGKILL
    adopted = LeasedProcess.adopt(directory, "one", 0.2)
    assert adopted is not None
    assert (adopted.alive(), adopted.record.epoch, adopted.record.ports) == (True, 7, (1, 2))
    assert adopted.end(0.2)
    until(lambda: not left(directory))


def test_a_process_with_another_fingerprint_is_ended_instead_of_adopted(directory: Path) -> None:
    start(directory)
    assert LeasedProcess.adopt(directory, "two", 0.2) is None
    until(lambda: not left(directory))


def test_processes_left_by_a_killed_host_are_found_and_ended(directory: Path) -> None:
    process = start(directory)
    os.kill(process.record.pid, signal.SIGKILL)
    until(lambda: not process.alive())
    assert len(left(directory)) >= 1  # the grandchild, which got no signal
    assert LeasedProcess.adopt(directory, "one", 0.2) is None
    until(lambda: not left(directory))


def test_a_process_with_a_reused_pid_is_not_taken_for_ours() -> None:
    own = psutil.Process()
    assert processes.find(own.pid, own.create_time()) is not None
    assert processes.find(own.pid, own.create_time() - 60) is None
