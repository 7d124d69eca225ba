"""A real fleet for tests, brought up and down by the command line as a person would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.fleet import Fleet
from deploy.home import FleetHome
from deploy.lifecycle.down import marked

ROOT = Path(__file__).resolve().parents[2]
UP_LIMIT_S = 900


@dataclass(frozen=True)
class RunningFleet:
    url: str
    model: str
    fleet: Fleet
    home: FleetHome
    base: Path

    def cli(self, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
        return conserve(self.base, *arguments, timeout_s=timeout_s)

    def status(self) -> dict[str, Any]:
        answer = self.cli("status", self.fleet.name, "--json")
        assert answer.returncode == 0, answer.stderr
        status: dict[str, Any] = json.loads(answer.stdout)
        return status

    def engines(self) -> dict[str, dict[str, Any]]:
        return {engine["engine"]: engine for engine in self.status()["engines"]}

    def processes(self, *words: str) -> list[int]:
        """Pids of this fleet's processes whose command line has all `words`."""
        found = []
        for process in marked(self.home):
            line = " ".join(_command_line(process.pid))
            if all(word in line for word in words):
                found.append(process.pid)
        return found

    def actor(self, title: str) -> int:
        """Pid of the Ray worker process that runs the actor class `title`, as in `DirectoryActor`."""
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
