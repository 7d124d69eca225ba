"""What many tests share: one real fleet a session."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.fleet import load_fleet
from deploy.home import FleetHome
from tests.support.fleet import ROOT, UP_LIMIT_S, RunningFleet, conserve
from workers.ports import free_port

# A shell that starts pytest in the background has it ignore Ctrl-C, and so would all the processes that tests
# start and end by it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def laptop_fleet() -> Iterator[RunningFleet]:
    """configs/laptop.yaml, up: Ray, one prefiller, two decoders, directory, gateway. A minute or more."""
    base = Path(tempfile.mkdtemp(prefix="conserve-"))  # a short path: sockets lie below it
    file = ROOT / "configs" / "laptop.yaml"
    fleet = load_fleet(file)
    port = free_port("127.0.0.1")
    try:
        answer = conserve(base, "up", str(file), "--detach", "--port", str(port), timeout_s=UP_LIMIT_S)
        assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
        home = FleetHome.of(fleet.name, str(base))
        yield RunningFleet(f"http://127.0.0.1:{port}", fleet.model.name, fleet, home, base)
    finally:
        conserve(base, "down", fleet.name, timeout_s=120)
        shutil.rmtree(base, ignore_errors=True)
