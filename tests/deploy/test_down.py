"""Bringing a fleet down does not wait for a supervisor that has ended but was not reaped."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.home import FleetHome, RunRecord
from deploy.lifecycle.down import bring_down

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def never_reaping() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        yield parent
        parent.kill()


@pytest.fixture
def base() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="conserve-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_down_treats_a_supervisor_that_is_a_zombie_as_ended(
    base: Path, never_reaping: "subprocess.Popen[str]"
) -> None:
    assert never_reaping.stdout is not None
    pid = int(never_reaping.stdout.readline())
    home = FleetHome(base / "one")
    home.create()
    home.write_run(RunRecord(pid, psutil.Process(pid).create_time(), "127.0.0.1:1"))
    began = time.monotonic()
    bring_down(home)
    assert time.monotonic() - began < 5
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert home.read_run() is None
