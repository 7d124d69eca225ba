"""Processes under test: start, readiness, CPU time, memory and end of a process tree."""

import contextlib
import os
import signal
import ssl
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HOST = "127.0.0.1"


@dataclass
class Subject:
    """A process tree that serves a port."""

    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    start_limit_s: float = 30.0
    ready_path: str = "/health"
    tls: bool = False
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{HOST}:{self.port}"

    def start(self, log: Path, processors: set[int]) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        os.sched_setaffinity(self.process.pid, processors)

    def wait_until_ready(self) -> bool:
        """Tell whether the process answers with 200 within `start_limit_s`."""
        trust = ssl._create_unverified_context() if self.tls else None
        limit = time.monotonic() + self.start_limit_s
        while time.monotonic() < limit and self.process is not None and self.process.poll() is None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}{self.ready_path}", timeout=1, context=trust) as answer,
            ):
                if answer.status == 200:
                    return True
            time.sleep(0.1)
        return False

    def cpu_seconds(self) -> float:
        """Return the time that all threads of the tree had a processor, by the scheduler's own count."""
        total = 0
        for process in self._tree():
            for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(task.read_text().split()[0])
        return total / 1e9

    def memory_mb(self) -> float:
        total = 0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def stop(self) -> None:
        """Kill the tree, including processes in groups of their own, as Ray's are."""
        if self.process is None:
            return
        tree = self._tree()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process = None  # another process may get the number

    def _tree(self) -> list[psutil.Process]:
        if self.process is None:
            return []
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
