"""Process helpers: ports, environments, atomic files, back-off, and ending whole process trees.

Processes are found by pid and start time, so that a new process with a reused pid is never ended.
"""

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

SOURCE = str(Path(__file__).resolve().parents[1])
# Above the ports of Ray's workers, below Kubernetes' node ports and Linux's ephemeral ports.
PORTS = range(20_000, 30_000)
TRIED_PORTS = 100


class WorkerError(Exception):
    """Base of this package's exceptions. The message says what is wrong and what to do."""


class Backoff:
    """Wait before a restart, which doubles from `first_s` to `longest_s`. Serving for `calm_s` resets it."""

    def __init__(self, first_s: float, longest_s: float, calm_s: float) -> None:
        self._first, self._longest, self._calm = first_s, longest_s, calm_s
        self._next = first_s
        self._serving_since: float | None = None
        self.failures = 0  # since the engine last served for `calm_s`

    def serving(self, now: float) -> None:
        self._serving_since = now

    def next(self, now: float) -> float:
        if self._serving_since is not None and now - self._serving_since >= self._calm:
            self._next, self.failures = self._first, 0
        self._serving_since = None
        self.failures += 1
        wait, self._next = self._next, min(self._longest, self._next * 2)
        return wait


def free_port(host: str) -> int:
    """Return a port of `host` that is free now.

    Another process may still take it; then the caller's process fails to start, and its keeper tries again.
    Ephemeral ports are avoided, because a connection could take the port of a process that restarts.
    """
    for port in (*random.sample(PORTS, TRIED_PORTS), 0):
        with contextlib.suppress(OSError), socket.socket(_family(host)) as listener:
            listener.bind((host, port))
            return int(listener.getsockname()[1])
    raise WorkerError(f"no free port at {host}: is it an address of this machine?")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1.0).close()
        return True
    return False


def listen_problem(host: str, port: int) -> str:
    """Return why a process cannot listen on this address now, or an empty string if it can."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def start(
    argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process in its own session, so that all processes that it starts can be found and ended."""
    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=cwd,
        )


def with_our_packages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with a PYTHONPATH of absolute paths, the first of which is this checkout."""
    parts = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    absolute = [os.path.abspath(part) for part in parts]
    return {**environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys((SOURCE, *absolute)))}


def write_atomically(file: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file so that readers, even after a crash, see its old or its new content, never a part."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.draft")
    with open(draft, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as opened:
        opened.write(content.encode() if isinstance(content, str) else content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class LogOnChange:
    """Log function that drops repetitions of a text. After an empty text, the same text is logged again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last = ""

    def __call__(self, text: str) -> None:
        if text and text != self._last:
            self._say(text)
        self._last = text


def find(pid: int, started: float) -> psutil.Process | None:
    """Return the process with this pid and start time, or None if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        # psutil computes start times from the boot time, which is in whole seconds and can change by one.
        if abs(process.create_time() - started) > 1.5 or process.status() == psutil.STATUS_ZOMBIE:
            return None
    except psutil.Error:
        return None
    return process


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def tree(root: psutil.Process) -> list[psutil.Process]:
    """Return the root, its descendants, and the members of the session that it leads.

    psutil omits descendants that seem older than their parent because the boot time changed by a second.
    """
    try:
        found = {process.pid: process for process in (root, *root.children(recursive=True))}
    except psutil.Error:
        found = {root.pid: root}
    for process in session(root.pid):
        found.setdefault(process.pid, process)
    return list(found.values())


def end(processes: Iterable[psutil.Process], grace_s: float) -> bool:
    """Terminate the processes, kill those that remain after `grace_s`, and return whether all are gone."""
    remaining = [process for process in processes if _running(process)]
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    remaining = _wait(remaining, grace_s)
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return not _wait(remaining, 5.0)


def lower_priority(pid: int, nice: int) -> None:
    """Set the niceness of a process's threads, and of threads that these start later, to `nice`."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def session(leader: int) -> Iterator[psutil.Process]:
    """Yield every process of the session that `leader` leads or led.

    The kernel does not reuse a pid while a session with this number exists, so that the pid of a killed
    leader still identifies its session.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == leader and alive(process.pid):
                yield process


def _wait(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    deadline = time.monotonic() + limit_s
    while remaining := [process for process in processes if _running(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return remaining


def _running(process: psutil.Process) -> bool:
    return bool(process.is_running()) and alive(process.pid)
