"""Starts, measures and ends the process trees that benchmarks measure, and runs helpers in processes."""

import contextlib
import os
import signal
import ssl
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

HOST = "127.0.0.1"


@dataclass
class Subject:
    """Server that a benchmark measures: a process tree that listens on a port."""

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
        """Wait until the server answers with 200; return False if it does not within `start_limit_s`."""
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
        """Return the CPU time of all threads of the process tree, as the kernel's scheduler counts it."""
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
        if self.process is not None:
            end_tree(self.process.pid)
            self.process.wait(10)
            self.process = None  # another process may get its pid

    def _tree(self) -> list[psutil.Process]:
        return [] if self.process is None else tree(self.process.pid)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants, or an empty list if the process has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_tree(pid: int) -> None:
    """Kill a process, its group, and all its descendants, even those in other groups, such as Ray's."""
    processes = tree(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)


@contextlib.contextmanager
def spawned(work: Callable[..., object], *arguments: Any) -> Iterator[Connection]:
    """Run `work` in a new process, and yield a pipe to it. `work` gets the other end, then `arguments`."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()  # so that our end of the pipe notices when the process dies
    try:
        yield ours
    finally:
        ours.close()
        process.join(20)
        if process.is_alive():
            end_tree(process.pid or 0)


def arrived(pipe: Connection) -> Counter[str]:
    """Return the sum of all counts that a process has sent through `pipe`, without waiting for more."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(EOFError):  # the process has ended
        while pipe.poll():
            counts += pipe.recv()
    return counts


def received(pipe: Connection, limit_s: float = 300.0) -> Any:
    """Return the next message from `pipe`; raise `TimeoutError` if none comes within `limit_s`."""
    if not pipe.poll(limit_s):
        raise TimeoutError(f"the other process sends nothing for {limit_s:g} s")
    return pipe.recv()
