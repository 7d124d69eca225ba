"""Real fleet for tests, brought up and down with the `conserve` command."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.fleet import FleetSpec, load_fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import marked
from deploy.lifecycle.status import fleet_status
from workers.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
UP_LIMIT_S, DOWN_LIMIT_S = 900, 200
Edit = Callable[[Any], object]


@dataclass(frozen=True)
class RunningFleet:
    url: str
    model: str
    fleet: FleetSpec
    home: FleetHome
    base: Path
    file: Path
    said: str  # output of `conserve up`

    def cli(self, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        return conserve(self.base, *arguments, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        """Return what `conserve status --json` prints, without starting a process."""
        return asdict(fleet_status(self.home))

    def engines(self) -> dict[str, dict[str, Any]]:
        return {engine["engine"]: engine for engine in self.status()["engines"]}

    def processes(self, *words: str) -> list[int]:
        """Return the pids of this fleet's processes whose command line has all `words`."""
        found = []
        for process in marked(self.home):
            line = " ".join(_command_line(process.pid))
            if all(word in line for word in words):
                found.append(process.pid)
        return found

    def actor(self, title: str) -> int:
        """Return the pid of the Ray worker that runs an actor class, such as `DirectoryActor`."""
        pids = self.processes(f"ray::{title}")
        assert len(pids) == 1, (title, pids)
        return pids[0]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def until(self, true: Callable[[], object], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, f"waited {limit_s:.0f} s for {what}"
            time.sleep(0.2)


@contextmanager
def fleet_up(shipped: str, edit: Edit = lambda content: None) -> Iterator[RunningFleet]:
    """Bring up `configs/SHIPPED.yaml`, changed by `edit`, on a free port; bring it down at the end.

    First turns go through a prefiller unless `edit` changes that, since most tests are about transfers.
    """
    base = Path(tempfile.mkdtemp(prefix="conserve-"))  # short: paths of Unix sockets below it have a limit
    content = yaml.safe_load((ROOT / "configs" / f"{shipped}.yaml").read_text())
    content["gateway"]["port"] = free_port("127.0.0.1")
    content["placement"] = {"first_turns": "prefiller"}
    edit(content)
    file = base / "fleet.yaml"
    file.write_text(yaml.safe_dump(content))
    fleet = load_fleet(file)
    try:
        up = conserve(base, "up", str(file), "--detach", timeout_s=UP_LIMIT_S)
        assert up.returncode == 0, f"{up.stdout}\n{up.stderr}"
        url, home = f"http://127.0.0.1:{fleet.gateway.port}", FleetHome.of(fleet.name, str(base))
        yield RunningFleet(url, fleet.model.name, fleet, home, base, file, up.stdout)
    finally:
        down = conserve(base, "down", fleet.name, timeout_s=DOWN_LIMIT_S)
        shutil.rmtree(base, ignore_errors=True)
        assert down.returncode == 0, down.stderr


def conserve(base: Path, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        env=environment(base),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def environment(base: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "CONSERVE_HOME": str(base), "PYTHONPATH": path}


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
