"""The supervisor keeps its children running, and leaves nothing behind when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from workers.processes import alive, session

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys
from pathlib import Path
import psutil
from deploy.supervisor import Child, supervise
base = Path(sys.argv[1])
sleep = "import time; time.sleep(600)"
code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', '{sleep}']); {sleep}"
argv = [sys.executable, "-c", code]
children = [Child(name, argv, os.environ, base / f"{name}.log") for name in ("one", "two")]
children[1].stale = base / "stale"
supervise(children, psutil.Process(int(sys.argv[2])) if len(sys.argv) > 2 else None)
"""


def until(true: Callable[[], object], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), *arguments]
        running.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True))
        until(lambda: len(below(running[-1].pid)) == 4)
        return running[-1]

    yield start
    for process in running:
        for left in below(process.pid):
            left.kill()
        process.kill()
        process.wait()


def test_the_supervisor_restarts_a_killed_child_after_ending_its_remaining_processes(
    started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    supervisor = started()
    before = {process.pid: process for process in below(supervisor.pid)}
    second = psutil.Process(supervisor.pid).children()[1]
    leftovers = [process.pid for process in session(second.pid)]
    (tmp_path / "stale").write_text("of the run before")
    second.kill()
    until(lambda: not (tmp_path / "stale").exists())
    until(lambda: len(below(supervisor.pid)) == 4)
    now = {process.pid for process in below(supervisor.pid)}
    assert len(now & set(before)) == 2, "the other child goes on"
    assert not now & set(leftovers)
    until(lambda: not any(alive(pid) for pid in leftovers))


def test_a_terminated_supervisor_ends_all_its_processes(
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    supervisor = started()
    everything = below(supervisor.pid)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(20) == 0
    until(lambda: not any(process.is_running() for process in everything))


def test_the_supervisor_ends_with_the_process_that_started_it(
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    supervisor = started(str(owner.pid))
    everything = below(supervisor.pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    supervisor.wait(20)
    until(lambda: not any(process.is_running() for process in everything))
